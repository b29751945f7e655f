"""Files that other processes read while a test goes on."""

from __future__ import annotations

from pathlib import Path


def put(file: Path, text: str) -> None:
    """Have a file say something else, at once: who reads it never finds a part."""
    draft = file.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(file)
