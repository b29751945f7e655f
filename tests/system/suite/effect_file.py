"""Files in which the tools of these tests record effects and wait."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from pawl.tools import ToolError


def effect_file(path: str) -> Path:
    """Return a file of a test. Other paths are refused, because some tests call every tool with harmful arguments."""
    file = Path(path)
    if Path(tempfile.gettempdir()).resolve() not in file.resolve().parents:
        raise ToolError(f"{path} is not a file for effects")
    return file


async def held(path: str) -> None:
    """Create a file `.held` to report that a tool waits, and wait until the test creates `.go`."""
    file = effect_file(path)
    file.with_suffix(".held").touch()
    await exists(file.with_suffix(".go"))


async def exists(file: Path) -> None:
    while not file.exists():
        await asyncio.sleep(0.02)
