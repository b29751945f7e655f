"""Files that other processes read during a test."""

from __future__ import annotations

from pathlib import Path


def put(file: Path, text: str) -> None:
    """Replace a file atomically, so that readers never see a partial file."""
    draft = file.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(file)
