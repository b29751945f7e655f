"""A clock that a test moves by hand."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class ManualClock:
    """Time passes only in `advance`, which wakes sleepers in order."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self._now = now
        self._monotonic = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic + seconds, next(self._order), woken))
        await woken

    async def advance(self, seconds: float) -> None:
        """Advance the clock by `seconds` and wake each sleeper at its time, in order."""
        until = self._monotonic + seconds
        await _settle()
        while self._sleepers and self._sleepers[0][0] <= until:
            at, _, woken = heapq.heappop(self._sleepers)
            if woken.cancelled():
                continue
            self._move_to(at)
            woken.set_result(None)
            await _settle()
        self._move_to(until)

    def step_back(self, seconds: float) -> None:
        """Set the time of day back, as an administrator might; sleepers are not affected."""
        self._now -= seconds

    def _move_to(self, monotonic: float) -> None:
        self._now += monotonic - self._monotonic
        self._monotonic = monotonic


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
