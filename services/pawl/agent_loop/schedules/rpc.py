"""Serves pawl.agent.v1.ScheduleService and fires schedules.

The ledger decides when a schedule is due and creates the run. This module prepares the run's message, as if the user
had started the run.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final
from zoneinfo import ZoneInfo

from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent.v1 import schedule_pb2 as pb
from pawl.agent_loop.api import convert
from pawl.agent_loop.schedules.starting import NO_REQUEST, RETRYABLE, ClaimPause, Starting, caller_of, fire_safely
from pawl.chassis.identity.auth import Principal, require_user
from pawl.chassis.ids import RequestId, RunId, check_id
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.client import translated
from pawl.chassis.rpc.kinds import Context
from pawl.errors import DependencyUnavailable, InvalidField
from pawl.event.v1.schedule_pb2 import ScheduleFire
from pawl.job.v1 import schedules_pb2, schedules_pb2_grpc
from pawl.job.v1.schedules_pb2 import DueSchedule
from pawl.server.rpc.server import Forward

_SERVICE: Final = "/pawl.agent.v1.ScheduleService"
_CLAIMED_MAX: Final = 64
# Many schedules are due on the hour. Fire only a few at a time, so that users who start runs hardly notice. After two
# seconds, double the number every second, at most three times.
_AT_ONCE: Final = 4
_FEW_SECONDS: Final = 2
_DOUBLED_MAX: Final = 3
_PAUSE_SECONDS: Final = 0.02
_TRIGGERS_MAX: Final = 8
_RETRY_SECONDS: Final = 1.0
_LATE_SECONDS: Final = 60


class ScheduleServicer:
    """Fires schedules when they are due or when users trigger them. `stub` calls job-store, which stores the schedules.

    The methods here need agents. `forward` passes the others to job-store.
    """

    def __init__(
        self,
        stub: schedules_pb2_grpc.ScheduleLedgerServiceAsyncStub,
        starting: Starting,
        clock: Clock,
        forward: Forward,
    ) -> None:
        self._stub = stub
        self._forward = forward
        self._starting = starting
        self._clock = clock
        self._pause = ClaimPause(clock)

    async def CreateSchedule(self, request: pb.CreateScheduleRequest, context: Context) -> pb.CreateScheduleResponse:
        await self._starting.check(require_user(), request.definition)
        response = await self._forward(f"{_SERVICE}/CreateSchedule", request.SerializeToString())
        self._pause.note_change()
        return pb.CreateScheduleResponse.FromString(response)

    async def UpdateSchedule(self, request: pb.UpdateScheduleRequest, context: Context) -> pb.UpdateScheduleResponse:
        await self._starting.check(require_user(), request.definition)
        response = await self._forward(f"{_SERVICE}/UpdateSchedule", request.SerializeToString())
        self._pause.note_change()
        return pb.UpdateScheduleResponse.FromString(response)

    async def ResumeSchedule(self, request: pb.ResumeScheduleRequest, context: Context) -> pb.ResumeScheduleResponse:
        response = await self._forward(f"{_SERVICE}/ResumeSchedule", request.SerializeToString())
        self._pause.note_change()
        return pb.ResumeScheduleResponse.FromString(response)

    async def TriggerSchedule(self, request: pb.TriggerScheduleRequest, context: Context) -> pb.TriggerScheduleResponse:
        name = check_id(request.name, "name")
        fire = await self.trigger(require_user(), name, convert.request_id(request))
        return pb.TriggerScheduleResponse(fire=fire)

    async def BackfillSchedule(
        self, request: pb.BackfillScheduleRequest, context: Context
    ) -> pb.BackfillScheduleResponse:
        name, request_id = check_id(request.name, "name"), convert.request_id(request)
        if not (request.HasField("begin_time") and request.HasField("end_time")):
            missing = "end_time" if request.HasField("begin_time") else "begin_time"
            raise InvalidField(f"{missing} is required", field=missing)
        fires = await self.backfill(require_user(), name, request.begin_time, request.end_time, request_id)
        return pb.BackfillScheduleResponse(fires=fires)

    async def trigger(
        self, caller: Principal, name: str, request_id: RequestId, backfill_time: Timestamp | None = None
    ) -> ScheduleFire:
        """Fire one of the caller's schedules, now or for a past scheduled time. Return the firing.

        Idempotent by request id.

        Raises:
            ScheduleNotFound, RequestIdReused
            DependencyUnavailable: The schedule changed repeatedly, or the ledger is unavailable.
        """
        request = schedules_pb2.GetDueScheduleRequest(store_id=caller.store_id, user_id=caller.user_id, name=name)
        for _ in range(_TRIGGERS_MAX):
            found = await translated(self._stub.GetDueSchedule(request))
            if (fire := await self._fire(found.due, request_id, backfill_time)) is not None:
                return fire
        raise DependencyUnavailable("the schedule is being changed: try again later")

    async def backfill(
        self, caller: Principal, name: str, start: Timestamp, end: Timestamp, request_id: RequestId
    ) -> Sequence[ScheduleFire]:
        """Fire a schedule for its past scheduled times from `start` (inclusive) to `end` (exclusive).

        Return the firings. Idempotent by request id and scheduled time.

        Raises:
            ScheduleNotFound, InvalidField, TooLarge, RequestIdReused
            DependencyUnavailable: See `trigger`. The schedule may have fired for some of the times.
        """
        request = schedules_pb2.GetDueScheduleRequest(
            store_id=caller.store_id, user_id=caller.user_id, name=name, begin_time=start, end_time=end
        )
        found = await translated(self._stub.GetDueSchedule(request))
        return [await self.trigger(caller, name, _part_id(request_id, time), time) for time in found.past_times]

    async def fire_forever(self) -> None:
        start = self._clock.monotonic()
        while True:
            self._pause.claiming()
            due, wait_seconds = await self._claim()
            await self._fire_all(due, start)
            # After a batch, more schedules may have become due: claim again immediately.
            if not due:
                await self._pause.wait(wait_seconds)
            if len(due) < _CLAIMED_MAX:
                start = self._clock.monotonic()

    async def _claim(self) -> tuple[Sequence[DueSchedule], float]:
        """Return due schedules, and the number of seconds until more may be due."""
        try:
            claimed = await translated(
                self._stub.ClaimSchedules(schedules_pb2.ClaimSchedulesRequest(schedules_max=_CLAIMED_MAX))
            )
            return claimed.schedules, claimed.wait_seconds
        except RETRYABLE:
            return (), _RETRY_SECONDS

    async def _fire_all(self, due: Sequence[DueSchedule], start: float) -> None:
        left = list(due)
        while left:
            seconds = self._clock.monotonic() - start
            at_once = _AT_ONCE << min(max(0, int(seconds) + 1 - _FEW_SECONDS), _DOUBLED_MAX)
            await asyncio.gather(
                *(fire_safely("schedule", each.owner, self._fire(each, NO_REQUEST)) for each in left[:at_once])
            )
            if left := left[at_once:]:
                await self._clock.sleep(_PAUSE_SECONDS)

    async def _fire(
        self, due: DueSchedule, request_id: RequestId, backfill_time: Timestamp | None = None
    ) -> ScheduleFire | None:
        now = datetime.fromtimestamp(self._clock.now(), UTC)
        past_time = None if backfill_time is None else backfill_time.ToDatetime(tzinfo=UTC)
        scope = {"schedule": {"name": due.definition.name, "time": _time_text(due, past_time, now)}}
        message, refusal = await self._starting.message(
            caller_of(due.owner), due.definition, scope, request_id, last_run_id=RunId(due.last_run_id)
        )
        if message is not None and not due.definition.workflow:
            note = fire_note(due, now, past_time)
            instructions = "\n\n".join(filter(None, (message.options.instructions, note)))
            message.options.instructions = instructions
        request = schedules_pb2.FireScheduleRequest(
            due=due, message=message, refusal=refusal, request_id=request_id, backfill_time=backfill_time
        )
        response = await translated(self._stub.FireSchedule(request))
        self._pause.note_change()  # The schedule may be waiting for the previous run, or be due again soon.
        return response.fire if response.HasField("fire") else None


def fire_note(due: DueSchedule, now: datetime, backfill_time: datetime | None = None) -> str:
    expected_time = _expected_time(due)
    when = f"{_time_text(due, backfill_time, now)} ({due.definition.time_zone or 'UTC'})"
    if backfill_time is not None:
        how = f"It is for the past scheduled time {when} (a backfill)."
    elif expected_time is None:
        how = f"It was started manually at {when}."
    else:
        late_seconds = int((now - expected_time).total_seconds())
        how = f"It was due at {when}"
        how += f" and is {late_seconds} seconds late." if late_seconds >= _LATE_SECONDS else "."
    return f"This run belongs to the schedule {due.definition.name}. {how}"


def _time_text(due: DueSchedule, backfill_time: datetime | None, now: datetime) -> str:
    time = backfill_time or _expected_time(due) or now
    return time.astimezone(ZoneInfo(due.definition.time_zone or "UTC")).isoformat(timespec="seconds")


def _expected_time(due: DueSchedule) -> datetime | None:
    return due.expected_time.ToDatetime(tzinfo=UTC) if due.HasField("expected_time") else None


def _part_id(request_id: RequestId, time: Timestamp) -> RequestId:
    digest = hashlib.sha256(f"{request_id} {time.ToJsonString()}".encode()).hexdigest()
    return RequestId(f"backfill_{digest[:32]}") if request_id else NO_REQUEST
