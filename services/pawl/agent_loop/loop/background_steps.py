"""Background runs give way to foreground runs, which share this process, job-store and the database with them.

A worker's foreground is *at work* while a foreground run executes a step, or while a user's message is being accepted.
Background runs then start no steps, and the worker claims no more of them. Both continue as soon as the foreground has
been quiet for a moment, for example while a model or tool takes long, or after a short time in any case.

Each step or message counts for at most 0.25 seconds, so that one that is stuck does not slow all background runs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Final

# More steps at the same time delay other runs more, fewer cost more CPU time each, because commits share less.
_STEPS_MAX: Final = 4
_STEP_SECONDS_MAX: Final = 2.0
_FOREGROUND_SECONDS_MAX: Final = 0.25
# Longer than the usual time between two steps of a run whose model and tools respond without delay.
QUIET_SECONDS: Final = 0.025
# About twice the duration of such a run. Also the pace of background runs if the foreground is never quiet.
YIELD_SECONDS_MAX: Final = 0.1


def yield_seconds(now: float, *, since: float, foreground_at: float) -> float:
    """Return how long background work that is due since `since` must still wait.

    `foreground_at` is when the foreground was last at work, which can be `now`.
    """
    return max(0.0, min(foreground_at + QUIET_SECONDS, since + YIELD_SECONDS_MAX) - now)


class BackgroundSteps:
    """A limit on the number of background runs that execute a step at the same time, in order of arrival.

    A step that takes longer than two seconds, for example during an outage, releases its slot, so that it cannot block
    others.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_STEPS_MAX)
        self._foreground_work = 0
        self._foreground_at = -math.inf

    @asynccontextmanager
    async def foreground(self) -> AsyncIterator[None]:
        """Record that the foreground is at work, for a limited time."""
        loop = asyncio.get_running_loop()

        def end() -> None:
            self._foreground_work -= 1
            self._foreground_at = loop.time()

        with ExitStack() as work:
            self._foreground_work += 1
            work.callback(end)
            work.callback(loop.call_later(_FOREGROUND_SECONDS_MAX, work.close).cancel)
            yield

    def yield_seconds(self, since: float) -> float:
        """See the function. `since` is a time of the event loop."""
        now = asyncio.get_running_loop().time()
        return yield_seconds(now, since=since, foreground_at=now if self._foreground_work else self._foreground_at)

    async def give_way(self) -> None:
        """Wait until background work may continue."""
        since = asyncio.get_running_loop().time()
        while wait_seconds := self.yield_seconds(since):  # noqa: ASYNC110  # time is the condition
            await asyncio.sleep(wait_seconds)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold a slot for a background run's step, once the foreground permits it. Safe to cancel."""
        await self._free.acquire()
        with ExitStack() as slot:
            slot.callback(self._free.release)
            await self.give_way()
            slot.callback(asyncio.get_running_loop().call_later(_STEP_SECONDS_MAX, slot.close).cancel)
            yield
