"""A clock that a test moves by hand, and an event loop whose clock jumps over hours of waiting."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar


class ManualClock:
    """A clock on which time passes only in `advance`."""

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
        """Advance the clock by `seconds` and wake sleepers in the order of their times."""
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
        """Set the time of day back, as an administrator might. Sleepers are not affected."""
        self._now -= seconds

    def _move_to(self, monotonic: float) -> None:
        self._now += monotonic - self._monotonic
        self._monotonic = monotonic


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


T = TypeVar("T")

_RESOLUTION_SECONDS = 1e-6


class _JumpingSelector(selectors.SelectSelector):
    """A selector that jumps to the next timer instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits for something that nothing will do")
        if not ready and timeout is not None:
            self.now += max(timeout, _RESOLUTION_SECONDS)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class VirtualClock:
    """The clock of the running loop. Wall time and monotonic time are equal."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
