"""Doing again what a dependency could not do now."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from services.agent_loop.app.ports import Randomness
from services.chassis.clock import Clock
from services.errors import Cancelled, DeadlineExceeded, Internal, Overloaded, PawlError, Unavailable

T = TypeVar("T")

_FIRST_PAUSE_SECONDS: Final = 0.05
_PAUSE_SECONDS_MAX: Final = 2.0

INTERNAL_SECONDS_MAX: Final = 180.0
"""So long an INTERNAL may last, answer after answer, before it is believed.

It is a fault of the program that answers, or of what it stands on: a disk, a database after a failover. Most pass.
"""

TRANSIENT: Final = (Unavailable, DeadlineExceeded, Cancelled, Overloaded, Internal)
"""Errors that say nothing about the request: the same one may succeed later."""


class Patience:
    """Repeats requests that are safe to repeat, with growing, jittered pauses; after an INTERNAL for minutes only."""

    def __init__(self, clock: Clock, random: Randomness, *, internal_seconds_max: float = INTERNAL_SECONDS_MAX) -> None:
        self._clock = clock
        self._random = random
        self._internal_seconds_max = internal_seconds_max

    async def until_answered(self, request: Callable[[], Awaitable[T]], *, seconds_max: float = float("inf")) -> T:
        """Return the answer of `request`, made again for as long as it fails in a transient way.

        Raises:
            PawlError: it failed otherwise, or transiently for `seconds_max`.
        """
        began, failures = self._clock.monotonic(), 0
        internal_since: float | None = None
        while True:
            try:
                return await request()
            except TRANSIENT as error:
                now = self._clock.monotonic()
                left = began + seconds_max - now
                internal_since = (internal_since or now) if isinstance(error, Internal) else None
                if internal_since is not None:
                    left = min(left, internal_since + self._internal_seconds_max - now)
                await self.pause(error, failures, left=left)
                failures += 1

    async def pause(self, error: PawlError, failures: int, *, left: float) -> None:
        """Wait before another attempt.

        Raises:
            PawlError: `error`, if there is no time left.
        """
        if left <= 0:
            raise error
        pause = min(_FIRST_PAUSE_SECONDS * 2 ** min(failures, 10), _PAUSE_SECONDS_MAX)
        await self._clock.sleep(pause * (0.5 + self._random() / 2))
