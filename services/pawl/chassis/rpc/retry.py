"""Asking again for what a dependency could not do now."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final, TypeVar

from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.errors import Cancelled, DeadlineExceeded, Internal, Overloaded, Unavailable

T = TypeVar("T")

INTERNAL_SECONDS_MAX: Final = 180.0
"""So long an INTERNAL may last, answer after answer, before it is believed.

It is a fault of the program that answers, or of what it stands on: a disk, a database after a failover. Most pass.
"""

AWAY: Final = (Unavailable, DeadlineExceeded, Cancelled, Overloaded)
"""Errors that say nothing about the request: the same one may succeed later, however long that takes."""

TRANSIENT: Final = (*AWAY, Internal)
"""Errors after which a request is made again."""

ANY: Final = (Exception,)
"""The same for what asks a database itself, which says in many ways that a disk is full or a failover goes on."""

_FIRST_PAUSE_SECONDS: Final = 0.05
_PAUSE_SECONDS_MAX: Final = 2.0

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """The failures of one request, all in a row."""

    count: int = 0
    broken_since: float = math.inf
    """Since when each attempt has failed in another way than by a dependency that is away."""

    def then(self, error: Exception, now: float) -> Failures:
        """Return the failures, one more with them."""
        broken_since = math.inf if isinstance(error, AWAY) else min(self.broken_since, now)
        return Failures(count=self.count + 1, broken_since=broken_since)


def pause_seconds(failures: int, chance: float) -> float:
    """Return how long to wait after so many failures: ever longer, and by chance, which spreads those who wait."""
    longest = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10), _PAUSE_SECONDS_MAX)
    return longest * (0.5 + chance / 2)


def asked_seconds(header: str, *, now: float | None = None) -> float | None:
    """Return how long a header asks to wait, in seconds or, as Retry-After may (RFC 9110, 10.2.3), as a date.

    `now` is the time of day in seconds since 1970, None where a date says nothing. None if it says no such thing.
    """
    try:
        seconds = float(header)
    except ValueError:
        if now is None:
            return None
        try:
            seconds = parsedate_to_datetime(header).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


class Retry:
    """Makes requests that are safe to repeat until they are answered.

    An error of `transient` leads to another attempt: for as long as the dependency is away, for `internal_seconds_max`
    if it fails otherwise all the time. With an `event`, each failure is logged under that name.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        chance: Callable[[], float] = random.random,
        transient: tuple[type[Exception], ...] = TRANSIENT,
        internal_seconds_max: float = INTERNAL_SECONDS_MAX,
        event: str = "",
    ) -> None:
        self._clock = clock
        self._chance = chance
        self._transient = transient
        self._internal_seconds_max = internal_seconds_max
        self._event = event

    async def until_answered(
        self, request: Callable[[], Awaitable[T]], *, seconds_max: float = math.inf, call: str = ""
    ) -> T:
        """Return the answer of `request`; `call` is for the log.

        Raises:
            Exception: what the last attempt failed with: not transient, or for too long.
        """
        give_up_at, failures = self._clock.monotonic() + seconds_max, Failures()
        while True:
            try:
                return await request()
            except self._transient as error:
                now = self._clock.monotonic()
                failures = failures.then(error, now)
                if self._event:
                    _log.warning(self._event, call=call, failures=failures.count, error=type(error).__name__)
                left = min(give_up_at, failures.broken_since + self._internal_seconds_max) - now
                await self.pause(error, failures.count, left=left)

    async def pause(self, error: Exception, failures: int, *, left: float) -> None:
        """Wait before another attempt.

        Raises:
            Exception: `error`, if there is no time left.
        """
        if left <= 0:
            raise error
        await self._clock.sleep(pause_seconds(failures, self._chance()))
