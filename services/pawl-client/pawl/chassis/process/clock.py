"""Clocks, passed as arguments so that tests can control time."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Return the Unix time in seconds."""

    def monotonic(self) -> float:
        """Return the number of seconds since an arbitrary point in time. The value never decreases."""

    async def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`. Safe to cancel."""


class SystemClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
