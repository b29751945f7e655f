"""Waiting for what other processes do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

PATIENCE_SECONDS = 120.0


async def until(holds: Callable[[], Awaitable[bool]], *, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Return once `holds` does; it is asked again and again.

    Raises:
        TimeoutError: it did not within `patience_seconds`.
    """
    async with asyncio.timeout(patience_seconds):
        while not await holds():
            await asyncio.sleep(0.05)
