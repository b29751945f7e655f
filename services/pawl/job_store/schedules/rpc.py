"""Servicers for pawl.agent.v1.ScheduleService (forwarded by agent-loop) and pawl.job.v1.ScheduleLedgerService."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final

from pawl.agent.v1 import schedule_pb2 as pb
from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import RunId, check_id
from pawl.chassis.labels import check_labels
from pawl.chassis.rpc.kinds import Context
from pawl.chassis.rpc.translate import Translator
from pawl.errors import InvalidField
from pawl.event.v1 import schedule_pb2
from pawl.job.v1 import schedules_pb2 as ledger
from pawl.job.v1 import schedules_pb2_grpc
from pawl.job_store.ledger.ports import LimitsOf
from pawl.job_store.ledger.rpc import operations
from pawl.job_store.ledger.rpc.events import FIRE
from pawl.job_store.ledger.rpc.messages import moment, optional_moment, timestamp
from pawl.job_store.ledger.rules.fire import Fire
from pawl.job_store.schedules.rules import Definition, FireRow, Owner, ScheduleKey, ScheduleRow, check_note, owner_of
from pawl.job_store.schedules.schedules import DueSchedule, Schedules
from pawl.job_store.schedules.timing import cron_text, past_times
from pawl.values import Overlap, RunState

CLAIMED_MAX: Final = 512

_WIRE: Final = Translator(
    lambda unknown: InvalidField(f"{unknown.field} has an unknown value", field=unknown.field),
    defaults={Overlap: Overlap.SKIP},
)
_DEFINITION: Final = _WIRE.struct(Definition, schedule_pb2.ScheduleDefinition, field="definition")
OWNER: Final = _WIRE.struct(Owner, ledger.ScheduleOwner)


class ScheduleServicer:
    """Implements the schedule methods. agent-loop validates the runs' settings, then calls them on behalf of a user."""

    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules

    async def CreateSchedule(self, request: pb.CreateScheduleRequest, context: Context) -> pb.CreateScheduleResponse:
        row = await self._schedules.put(
            owner_of_user(), _definition(request.definition), must_exist=False, validate_only=request.validate_only
        )
        return pb.CreateScheduleResponse(schedule=_message(row))

    async def UpdateSchedule(self, request: pb.UpdateScheduleRequest, context: Context) -> pb.UpdateScheduleResponse:
        row = await self._schedules.put(
            owner_of_user(), _definition(request.definition), must_exist=True, validate_only=request.validate_only
        )
        return pb.UpdateScheduleResponse(schedule=_message(row))

    async def GetSchedule(self, request: pb.GetScheduleRequest, context: Context) -> pb.GetScheduleResponse:
        user = require_user()
        row, states, now = await self._schedules.get(user.store_id, user.user_id, check_id(request.name, "name"))
        schedule = _message(row)
        # A schedule with an unknown time zone is returned without its next times, so that it can be changed or deleted.
        with suppress(InvalidField):
            schedule.next_times.extend(map(timestamp, row.next_times(now)))
        schedule.fires.extend(fire_message(fire, states) for fire in row.fires)
        return pb.GetScheduleResponse(schedule=schedule)

    async def ListSchedules(self, request: pb.ListSchedulesRequest, context: Context) -> pb.ListSchedulesResponse:
        user = require_user()
        return pb.ListSchedulesResponse(
            schedules=map(_message, await self._schedules.list(user.store_id, user.user_id))
        )

    async def PauseSchedule(self, request: pb.PauseScheduleRequest, context: Context) -> pb.PauseScheduleResponse:
        name, note = check_id(request.name, "name"), check_note(request.note)
        row = await self._schedules.pause(owner_of_user(), name, note, paused=True)
        return pb.PauseScheduleResponse(schedule=_message(row))

    async def ResumeSchedule(self, request: pb.ResumeScheduleRequest, context: Context) -> pb.ResumeScheduleResponse:
        row = await self._schedules.pause(owner_of_user(), check_id(request.name, "name"), "", paused=False)
        return pb.ResumeScheduleResponse(schedule=_message(row))

    async def DeleteSchedule(self, request: pb.DeleteScheduleRequest, context: Context) -> pb.DeleteScheduleResponse:
        user = require_user()
        await self._schedules.delete(user.store_id, user.user_id, check_id(request.name, "name"))
        return pb.DeleteScheduleResponse()


class ScheduleLedgerServicer(schedules_pb2_grpc.ScheduleLedgerServiceServicer):
    def __init__(self, schedules: Schedules, limits_of: LimitsOf) -> None:
        self._schedules = schedules
        self._limits_of = limits_of

    async def GetDueSchedule(
        self, request: ledger.GetDueScheduleRequest, context: Context
    ) -> ledger.GetDueScheduleResponse:
        begin, end = moment(request.begin_time, "begin_time"), moment(request.end_time, "end_time")
        store_id, user_id = check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id")
        row, _, now = await self._schedules.get(store_id, user_id, check_id(request.name, "name"))
        past: Sequence[datetime] = ()
        if request.HasField("begin_time") or request.HasField("end_time"):
            past = past_times(row.definition, row.schedule_id, begin, min(end, now))
        return ledger.GetDueScheduleResponse(due=_due(DueSchedule(row)), past_times=map(timestamp, past))

    async def ClaimSchedules(
        self, request: ledger.ClaimSchedulesRequest, context: Context
    ) -> ledger.ClaimSchedulesResponse:
        if not 1 <= request.schedules_max <= CLAIMED_MAX:
            raise InvalidField(
                f"schedules_max must be between 1 and {CLAIMED_MAX}, got {request.schedules_max}", field="schedules_max"
            )
        due, wait_seconds = await self._schedules.claim(request.schedules_max)
        return ledger.ClaimSchedulesResponse(schedules=map(_due, due), wait_seconds=wait_seconds)

    async def FireSchedule(self, request: ledger.FireScheduleRequest, context: Context) -> ledger.FireScheduleResponse:
        due = request.due
        store_id = check_id(due.owner.store_id, "store_id")
        fired = await self._schedules.fire(
            Fire(
                schedule=ScheduleKey(store_id, check_id(due.schedule_id, "schedule_id")),
                generation=due.generation,
                last_run_id=RunId(check_id(due.last_run_id, "last_run_id", optional=True)),
                expected_time=optional_moment(due, "expected_time", "due."),
                next_time=optional_moment(due, "next_time", "due."),
                submit=operations.submit(request.message, self._limits_of) if request.HasField("message") else None,
                refusal=request.refusal,
                request_id=check_id(request.request_id, "request_id", optional=True),
                backfill_time=optional_moment(request, "backfill_time"),
            ),
            request.ByteSize(),
        )
        return ledger.FireScheduleResponse(fire=None if fired is None else FIRE.write(fired))


def _definition(message: schedule_pb2.ScheduleDefinition) -> Definition:
    check_id(message.name, "definition.name")
    for name in ("start_time", "end_time"):
        moment(getattr(message, name), f"definition.{name}")
    definition = _DEFINITION.read(message)
    check_labels(definition.labels, "definition.labels")
    return definition


def owner_of_user() -> Owner:
    user = require_user()
    return Owner(
        store_id=user.store_id,
        user_id=user.user_id,
        user_roles=tuple(sorted(user.roles)),
        credential_id=user.credential_id,
        delegate_user_id=user.delegate_user_id,
        people=tuple(sorted(user.people)),
    )


def _message(row: ScheduleRow) -> schedule_pb2.Schedule:
    return schedule_pb2.Schedule(
        definition=_DEFINITION.write(row.definition),
        schedule_id=row.schedule_id,
        create_time=timestamp(row.create_time),
        next_time=None if row.due_time is None else timestamp(row.due_time),
        pause_time=None if row.pause_time is None else timestamp(row.pause_time),
        pause_note=row.pause_note,
        self_paused=row.self_paused,
        failures=row.failures,
        cron_text=cron_text(row.definition.cron) if row.definition.cron else "",
    )


def fire_message(fire: FireRow, states: Mapping[RunId, RunState]) -> schedule_pb2.ScheduleFire:
    message = FIRE.write(fire)
    if fire.run_id in states:
        message.run_state = states[fire.run_id].value  # type: ignore[assignment]  # the same numbers
    return message


def _due(due: DueSchedule) -> ledger.DueSchedule:
    row = due.row
    return ledger.DueSchedule(
        owner=OWNER.write(owner_of(row)),
        definition=_DEFINITION.write(row.definition),
        schedule_id=row.schedule_id,
        generation=row.generation,
        expected_time=None if due.expected_time is None else timestamp(due.expected_time),
        next_time=None if due.next_time is None else timestamp(due.next_time),
        last_run_id=row.last_run_id,
    )
