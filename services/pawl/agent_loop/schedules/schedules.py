"""Schedules of users, and their fires.

The ledger says when a schedule is due and makes the run; what the run is to be like is worked out here, as for a run
that its user starts.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final
from zoneinfo import ZoneInfo

from pawl.agent_loop.schedules.ledger import ScheduleLedger, caller_of
from pawl.agent_loop.schedules.starting import NO_REQUEST, PASSING, Starting
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RequestId
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.errors import DependencyUnavailable, ScheduleNotFound
from pawl.event.v1.schedule_pb2 import ScheduleFire
from pawl.job.v1.schedules_pb2 import DueSchedule

_CLAIMED_MAX: Final = 64
# Many are due at full hours. A few at a time are fired, so that people who start runs hardly notice; when that has
# taken two seconds, as where very many are due or the machine is busy, twice as many, and so on each second.
_AT_ONCE: Final = 4
_FEW_SECONDS: Final = 2
_DOUBLED_MAX: Final = 3
_PAUSE_SECONDS: Final = 0.02
_TRIGGERS_MAX: Final = 8
_WAIT_SECONDS_MIN: Final = 0.01
_AWAY_SECONDS: Final = 1.0
_LATE_SECONDS: Final = 60

_log = logs.get_logger(__name__)


class Schedules:
    """Fires schedules that are due, and those that their users fire now. job-store keeps them."""

    def __init__(self, *, ledger: ScheduleLedger, starting: Starting, clock: Clock) -> None:
        self._ledger = ledger
        self._starting = starting
        self._clock = clock

    async def trigger(self, caller: Principal, name: str, request_id: RequestId) -> ScheduleFire:
        """Fire a schedule of the caller now; return the fire. Idempotent by request id.

        Raises:
            ScheduleNotFound, RequestIdReused
            DependencyUnavailable: the schedule changed all the time, or the ledger is away.
        """
        return await self._fire_now(caller, name, request_id)

    async def backfill(
        self, caller: Principal, name: str, begin: datetime, end: datetime, request_id: RequestId
    ) -> Sequence[ScheduleFire]:
        """Fire a schedule for its due times of the past from `begin` on and before `end`; return the fires.

        Idempotent by request id, for each due time.

        Raises:
            ScheduleNotFound, InvalidField, TooLarge, RequestIdReused
            DependencyUnavailable: as `trigger`; some of them may have fired.
        """
        past_times = (await self._ledger.due(caller, name, begin, end)).past_times
        times = [time.ToDatetime(tzinfo=UTC) for time in past_times]
        return [await self._fire_now(caller, name, _part_of(request_id, time), time) for time in times]

    async def _fire_now(
        self, caller: Principal, name: str, request_id: RequestId, backfill_time: datetime | None = None
    ) -> ScheduleFire:
        for _ in range(_TRIGGERS_MAX):
            found = await self._ledger.due(caller, name)
            if (fire := await self._fire(found.due, request_id, backfill_time)) is not None:
                return fire
        raise DependencyUnavailable("the schedule changes at this moment: try again")

    async def fire_forever(self) -> None:
        """Fire what is due, as long as this process serves."""
        begin = self._clock.monotonic()
        while True:
            due, wait_seconds = await self._claim()
            await self._fire_all(due, begin)
            # Else what they are due for after that may have come meanwhile: so ask at once.
            if not due:
                await self._clock.sleep(max(wait_seconds, _WAIT_SECONDS_MIN))
            if len(due) < _CLAIMED_MAX:
                begin = self._clock.monotonic()

    async def _claim(self) -> tuple[Sequence[DueSchedule], float]:
        """Return schedules that are due, and the seconds until there may be more."""
        try:
            return await self._ledger.claim(_CLAIMED_MAX)
        except PASSING:
            return (), _AWAY_SECONDS

    async def _fire_all(self, due: Sequence[DueSchedule], begin: float) -> None:
        left = list(due)
        while left:
            seconds = self._clock.monotonic() - begin
            at_once = _AT_ONCE << min(max(0, int(seconds) + 1 - _FEW_SECONDS), _DOUBLED_MAX)
            await asyncio.gather(*map(self._fire_surely, left[:at_once]))
            if left := left[at_once:]:
                await self._clock.sleep(_PAUSE_SECONDS)

    async def _fire_surely(self, due: DueSchedule) -> None:
        """Fire a schedule; if that fails now, it will be claimed again."""
        try:
            await self._fire(due, NO_REQUEST)
        except (*PASSING, ScheduleNotFound) as error:
            _log.info("schedule.not_fired", store=due.owner.store_id, reason=error.reason)
        except Exception:  # noqa: BLE001  # one schedule keeps no other one from firing
            _log.exception("schedule.not_fired", store=due.owner.store_id)

    async def _fire(
        self, due: DueSchedule, request_id: RequestId, backfill_time: datetime | None = None
    ) -> ScheduleFire | None:
        message, refusal = await self._starting.message(caller_of(due.owner), due.definition, request_id)
        if message is not None:
            told = told_of(due, datetime.fromtimestamp(self._clock.now(), UTC), backfill_time)
            instructions = "\n\n".join(filter(None, (message.options.instructions, told)))
            message.options.instructions = instructions
        return await self._ledger.fire(
            due, message, refusal=refusal, request_id=request_id, backfill_time=backfill_time
        )


def told_of(due: DueSchedule, now: datetime, backfill_time: datetime | None = None) -> str:
    """Return what the model of a run is told of the fire that started it."""
    expected_time = due.expected_time.ToDatetime(tzinfo=UTC) if due.HasField("expected_time") else None
    time = backfill_time or expected_time or now
    zone = due.definition.time_zone or "UTC"
    when = f"{time.astimezone(ZoneInfo(zone)).isoformat(timespec='seconds')} ({zone})"
    if backfill_time is not None:
        how = f"It is for the due time {when} in the past (a backfill)."
    elif expected_time is None:
        how = f"It was started by hand at {when}."
    else:
        late_seconds = int((now - time).total_seconds())
        how = f"It was due at {when}"
        how += f" and is {late_seconds} seconds late." if late_seconds >= _LATE_SECONDS else "."
    return f"This run belongs to the schedule {due.definition.name}. {how}"


def _part_of(request_id: RequestId, time: datetime) -> RequestId:
    """Return the id of the part of a request that is about one due time."""
    digest = hashlib.sha256(f"{request_id} {time.isoformat()}".encode()).hexdigest()
    return RequestId(f"backfill_{digest[:32]}") if request_id else NO_REQUEST
