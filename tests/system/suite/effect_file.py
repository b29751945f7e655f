"""Where the tools of these tests leave their effects, and where they wait."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from pawl.tools import ToolError


def effect_file(path: str) -> Path:
    """A file of a test; no other, since some of the tests call every tool with arguments that do harm."""
    file = Path(path)
    if Path(tempfile.gettempdir()).resolve() not in file.resolve().parents:
        raise ToolError(f"{path} is not a file for effects")
    return file


async def held(path: str) -> None:
    """Say in a file `.held` that a tool waits, and wait until the test makes a file `.go`."""
    file = effect_file(path)
    file.with_suffix(".held").touch()
    await exists(file.with_suffix(".go"))


async def exists(file: Path) -> None:
    """Wait until there is a file."""
    while not file.exists():
        await asyncio.sleep(0.02)
