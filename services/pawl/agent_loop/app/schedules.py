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

from pawl.agent_loop.app.public_values import DueSchedule, ScheduledMessage
from pawl.agent_loop.app.starting import NO_REQUEST, NOTE_BYTES_MAX, PASSING, Starting
from pawl.agent_loop.app.starting_ports import ScheduleLedger
from pawl.agent_loop.domain import checks
from pawl.chassis import logs
from pawl.chassis.auth import Principal
from pawl.chassis.clock import Clock
from pawl.chassis.ids import RequestId
from pawl.errors import DependencyUnavailable, ScheduleNotFound

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
    """Keeps schedules, and fires those that are due. Documents are as the contract has them."""

    def __init__(self, *, ledger: ScheduleLedger, starting: Starting, clock: Clock) -> None:
        self._ledger = ledger
        self._starting = starting
        self._clock = clock

    async def save(
        self, caller: Principal, definition: object, scheduled: ScheduledMessage, *, must_exist: bool
    ) -> object:
        """Make a schedule of the caller, or change one, if a run could be started so now. Idempotent.

        Raises:
            AgentNotFound, InvalidField, InvalidId, TooLarge: no run could be.
            ScheduleExists, ScheduleNotFound
        """
        await self._starting.check(caller, scheduled)
        return await self._ledger.put_schedule(caller, definition, must_exist=must_exist)

    async def get(self, caller: Principal, name: str) -> object:
        """Return a schedule of the caller.

        Raises:
            ScheduleNotFound
        """
        return (await self._ledger.get_schedule(caller, name))[0]

    async def list(self, caller: Principal) -> Sequence[object]:
        """Return the schedules of the caller, by name."""
        return await self._ledger.list_schedules(caller)

    async def pause(self, caller: Principal, name: str, note: str = "", *, paused: bool) -> object:
        """Pause a schedule of the caller, or have it go on.

        Raises:
            ScheduleNotFound, InvalidField, TooLarge
        """
        checks.text(note, "note", bytes_max=NOTE_BYTES_MAX, may_be_empty=True)
        return await self._ledger.pause_schedule(caller, name, note, paused=paused)

    async def delete(self, caller: Principal, name: str) -> None:
        """Remove a schedule of the caller.

        Raises:
            ScheduleNotFound
        """
        await self._ledger.delete_schedule(caller, name)

    async def trigger(self, caller: Principal, name: str, request_id: RequestId) -> object:
        """Fire a schedule of the caller now; return the fire. Idempotent by request id.

        Raises:
            ScheduleNotFound, RequestIdReused
            DependencyUnavailable: the schedule changed all the time, or the ledger is away.
        """
        return await self._fire_now(caller, name, request_id)

    async def backfill(
        self, caller: Principal, name: str, begin: datetime, end: datetime, request_id: RequestId
    ) -> Sequence[object]:
        """Fire a schedule for its due times of the past from `begin` on and before `end`; return the fires.

        Idempotent by request id, for each due time.

        Raises:
            ScheduleNotFound, InvalidField, TooLarge, RequestIdReused
            DependencyUnavailable: as `trigger`; some of them may have fired.
        """
        times = await self._ledger.past_times(caller, name, begin, end)
        return [await self._fire_now(caller, name, _part_of(request_id, time), time) for time in times]

    async def _fire_now(
        self, caller: Principal, name: str, request_id: RequestId, backfill_time: datetime | None = None
    ) -> object:
        for _ in range(_TRIGGERS_MAX):
            _, due = await self._ledger.get_schedule(caller, name)
            if (fire := await self._fire(due, request_id, backfill_time)) is not None:
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
            return await self._ledger.claim_schedules(_CLAIMED_MAX)
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
            _log.info("schedule.not_fired", store=due.caller.store_id, reason=error.reason)
        except Exception:  # noqa: BLE001  # one schedule keeps no other one from firing
            _log.exception("schedule.not_fired", store=due.caller.store_id)

    async def _fire(
        self, due: DueSchedule, request_id: RequestId, backfill_time: datetime | None = None
    ) -> object | None:
        message, refusal = await self._starting.message(due.caller, due.message, request_id)
        if message is not None:
            told = told_of(due, datetime.fromtimestamp(self._clock.now(), UTC), backfill_time)
            instructions = "\n\n".join(filter(None, (message.options.instructions, told)))
            message.options.instructions = instructions
        return await self._ledger.fire_schedule(
            due, message, refusal=refusal, request_id=request_id, backfill_time=backfill_time
        )


def told_of(due: DueSchedule, now: datetime, backfill_time: datetime | None = None) -> str:
    """Return what the model of a run is told of the fire that started it."""
    time = backfill_time or due.expected_time or now
    zone = due.time_zone or "UTC"
    when = f"{time.astimezone(ZoneInfo(zone)).isoformat(timespec='seconds')} ({zone})"
    if backfill_time is not None:
        how = f"It is for the due time {when} in the past (a backfill)."
    elif due.expected_time is None:
        how = f"It was started by hand at {when}."
    else:
        late_seconds = int((now - time).total_seconds())
        how = f"It was due at {when}"
        how += f" and is {late_seconds} seconds late." if late_seconds >= _LATE_SECONDS else "."
    return f"This run belongs to the schedule {due.name}. {how}"


def _part_of(request_id: RequestId, time: datetime) -> RequestId:
    """Return the id of the part of a request that is about one due time."""
    digest = hashlib.sha256(f"{request_id} {time.isoformat()}".encode()).hexdigest()
    return RequestId(f"backfill_{digest[:32]}") if request_id else NO_REQUEST
