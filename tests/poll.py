"""Waits for conditions in other processes, and changes files that they read."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_SECONDS = 120.0
_PAUSE_SECONDS_MAX = 0.05


async def until(holds: Callable[[], object], *, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Poll a condition, which may be asynchronous, until it holds.

    Raises:
        TimeoutError: the condition did not hold within `patience_seconds`.
    """
    pause_seconds = 0.001
    async with asyncio.timeout(patience_seconds):
        while not await _answer(holds()):
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _PAUSE_SECONDS_MAX)


async def _answer(held: object) -> object:
    return await held if inspect.isawaitable(held) else held


def wait_until(holds: Callable[[], object], explain: Callable[[], object] = str) -> None:
    """Poll a condition until it holds. Fail with the explanation if it does not hold in time."""
    deadline = time.monotonic() + 2 * PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, explain()
        time.sleep(_PAUSE_SECONDS_MAX)


def put(file: Path, text: str) -> None:
    """Replace a file atomically, so that readers never see a partial file."""
    draft = file.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(file)
