"""Waiting for what other processes do."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable

PATIENCE_SECONDS = 120.0


async def until(holds: Callable[[], object], *, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Return once a condition holds, which may be asynchronous; it is asked again and again.

    Raises:
        TimeoutError: it did not within `patience_seconds`.
    """
    async with asyncio.timeout(patience_seconds):
        while not await _answer(holds()):
            await asyncio.sleep(0.05)


async def _answer(held: object) -> object:
    return await held if inspect.isawaitable(held) else held
