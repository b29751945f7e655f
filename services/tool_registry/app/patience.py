"""Statements that must not be lost to a database that is away or broken for a while."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from services.chassis import logs
from services.chassis.clock import Clock
from services.errors import Unavailable

INTERNAL_SECONDS_MAX: Final = 180.0
"""So long the database may fail in another way than by being away before that is believed."""

_RETRY_SECONDS: Final = (0.05, 0.2, 0.5, 1.0)

_log = logs.get_logger(__name__)
T = TypeVar("T")


async def until_answered(
    ask: Callable[[], Awaitable[T]], *, clock: Clock, internal_seconds_max: float, event: str, call: str
) -> T:
    """Ask the database, again for as long as it is away; `event` and `call` are for the log.

    Raises:
        Exception: what else it said, attempt after attempt, for `internal_seconds_max`.
    """
    failures, broken_since = 0, math.inf
    while True:
        try:
            return await ask()
        except Exception as error:  # a disk, a database after a failover: most faults pass
            now = clock.monotonic()
            broken_since = math.inf if isinstance(error, Unavailable) else min(broken_since, now)
            if now - broken_since >= internal_seconds_max:
                raise
            failures += 1
            _log.warning(event, call=call, failures=failures, error=type(error).__name__)
            await clock.sleep(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS)) - 1])
