"""Retries requests that a dependency could not serve."""

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

# Consecutive INTERNAL errors are retried for this time. INTERNAL is a fault of the server or of its dependencies, such
# as a disk or a database after a failover. Most of these faults are temporary.
INTERNAL_SECONDS_MAX: Final = 180.0

# Errors that are not caused by the request itself, so it may succeed later, however long that takes.
UNAVAILABLE: Final = (Unavailable, DeadlineExceeded, Cancelled, Overloaded)

# Errors after which a request is retried.
TRANSIENT: Final = (*UNAVAILABLE, Internal)

# The same for direct users of a database, which reports a full disk or a failover in many different ways.
ANY: Final = (Exception,)

_FIRST_PAUSE_SECONDS: Final = 0.05
_PAUSE_SECONDS_MAX: Final = 2.0

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    count: int = 0
    # Start of the consecutive failures that were not caused by an unavailable dependency.
    broken_since: float = math.inf

    def then(self, error: Exception, now: float) -> Failures:
        broken_since = math.inf if isinstance(error, UNAVAILABLE) else min(self.broken_since, now)
        return Failures(count=self.count + 1, broken_since=broken_since)


def pause_seconds(failures: int, chance: float) -> float:
    """Return the pause in seconds before the next retry: exponential backoff, with jitter from `chance` (0 to 1)."""
    longest = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10), _PAUSE_SECONDS_MAX)
    return longest * (0.5 + chance / 2)


def asked_seconds(header: str, *, now: float | None = None) -> float | None:
    """Return the delay in seconds that a Retry-After header requests (RFC 9110, 10.2.3), or None if it is invalid.

    The header contains seconds or a date. `now` is the Unix time. If it is None, dates count as invalid.
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
    """Sends requests until they are answered. Use it only for requests that are safe to repeat.

    After an error in `transient`, the request is sent again: without limit if a dependency was unavailable, and
    otherwise for up to `internal_seconds_max`. With `event`, each failure is logged under that name.
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
        """Send `request` until it is answered, and return the answer. `call` is its name in the log.

        Raises:
            Exception: The error of the last attempt, if it is not transient or no time for retries is left.
        """
        stop_at, failures = self._clock.monotonic() + seconds_max, Failures()
        while True:
            try:
                return await request()
            except self._transient as error:
                now = self._clock.monotonic()
                failures = failures.then(error, now)
                if self._event:
                    _log.warning(self._event, call=call, failures=failures.count, error=type(error).__name__)
                left = min(stop_at, failures.broken_since + self._internal_seconds_max) - now
                await self.pause(error, failures.count, left=left)

    async def pause(self, error: Exception, failures: int, *, left: float) -> None:
        """Wait before the next attempt.

        Raises:
            Exception: `error`, if no time for retries is left.
        """
        if left <= 0:
            raise error
        await self._clock.sleep(pause_seconds(failures, self._chance()))
