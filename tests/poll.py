"""Waits for conditions in other processes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable

PATIENCE_SECONDS = 120.0
_PAUSE_SECONDS_MAX = 0.05


async def until(holds: Callable[[], object], *, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Poll a condition, which may be asynchronous, until it holds.

    Raises:
        TimeoutError: it did not hold within `patience_seconds`.
    """
    pause_seconds = 0.001
    async with asyncio.timeout(patience_seconds):
        while not await _answer(holds()):
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _PAUSE_SECONDS_MAX)


async def _answer(held: object) -> object:
    return await held if inspect.isawaitable(held) else held
