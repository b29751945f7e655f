"""Waiting for other processes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable

PATIENCE_SECONDS = 120.0


async def until(holds: Callable[[], object], *, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Poll a condition, which may be asynchronous, until it holds.

    Raises:
        TimeoutError: it did not hold within `patience_seconds`.
    """
    async with asyncio.timeout(patience_seconds):
        while not await _answer(holds()):
            await asyncio.sleep(0.05)


async def _answer(held: object) -> object:
    return await held if inspect.isawaitable(held) else held
