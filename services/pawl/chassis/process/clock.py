"""Time as an argument: what reads the clock or waits gets one of these."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """The passing of time. Tests move it by hand."""

    def now(self) -> float:
        """Return the time of day, in seconds since 1970, UTC."""

    def monotonic(self) -> float:
        """Return seconds since some fixed moment; never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`. Safe to cancel."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
