"""Where the tools of these tests leave their effects."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pawl.tools import ToolError


def effect_file(path: str) -> Path:
    """A file of a test; no other, since some of the tests call every tool with arguments that do harm."""
    file = Path(path)
    if Path(tempfile.gettempdir()).resolve() not in file.resolve().parents:
        raise ToolError(f"{path} is not a file for effects")
    return file
