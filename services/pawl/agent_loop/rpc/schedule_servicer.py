"""pawl.agent.v1.ScheduleService: requests to use cases, what they return to responses."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Literal

from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent.v1 import schedule_pb2 as pb
from pawl.agent.v1 import schedule_pb2_grpc
from pawl.agent_loop.adapters.schedule_ledger import ScheduleLedgerClient
from pawl.agent_loop.app.schedules import Schedules
from pawl.agent_loop.app.starting import NOTE_BYTES_MAX
from pawl.agent_loop.domain import checks
from pawl.agent_loop.rpc import convert
from pawl.chassis.auth import require_user
from pawl.chassis.ids import check_id
from pawl.chassis.rpc_kinds import Context
from pawl.errors import InvalidField
from pawl.event.v1 import schedule_pb2


class ScheduleServicer(schedule_pb2_grpc.ScheduleServiceServicer):
    """Serves users. Store and user come from their credential alone."""

    def __init__(self, schedules: Schedules, ledger: ScheduleLedgerClient) -> None:
        self._schedules = schedules
        self._ledger = ledger

    async def CreateSchedule(self, request: pb.CreateScheduleRequest, context: Context) -> pb.CreateScheduleResponse:
        return pb.CreateScheduleResponse(schedule=await self._save(request.definition, must_exist=False))

    async def UpdateSchedule(self, request: pb.UpdateScheduleRequest, context: Context) -> pb.UpdateScheduleResponse:
        return pb.UpdateScheduleResponse(schedule=await self._save(request.definition, must_exist=True))

    async def _save(self, definition: schedule_pb2.ScheduleDefinition, *, must_exist: bool) -> schedule_pb2.Schedule:
        check_id(definition.name, "definition.name")
        return await self._schedules.save(require_user(), definition, must_exist=must_exist)

    async def GetSchedule(self, request: pb.GetScheduleRequest, context: Context) -> pb.GetScheduleResponse:
        found = await self._ledger.get(require_user(), check_id(request.name, "name"))
        return pb.GetScheduleResponse(schedule=found.schedule)

    async def ListSchedules(self, request: pb.ListSchedulesRequest, context: Context) -> pb.ListSchedulesResponse:
        return pb.ListSchedulesResponse(schedules=await self._ledger.list(require_user()))

    async def PauseSchedule(self, request: pb.PauseScheduleRequest, context: Context) -> pb.PauseScheduleResponse:
        name = check_id(request.name, "name")
        checks.text(request.note, "note", bytes_max=NOTE_BYTES_MAX, may_be_empty=True)
        paused = await self._ledger.pause(require_user(), name, request.note, paused=True)
        return pb.PauseScheduleResponse(schedule=paused)

    async def ResumeSchedule(self, request: pb.ResumeScheduleRequest, context: Context) -> pb.ResumeScheduleResponse:
        resumed = await self._ledger.pause(require_user(), check_id(request.name, "name"), paused=False)
        return pb.ResumeScheduleResponse(schedule=resumed)

    async def TriggerSchedule(self, request: pb.TriggerScheduleRequest, context: Context) -> pb.TriggerScheduleResponse:
        name = check_id(request.name, "name")
        fire = await self._schedules.trigger(require_user(), name, convert.request_id(request))
        return pb.TriggerScheduleResponse(fire=fire)

    async def BackfillSchedule(
        self, request: pb.BackfillScheduleRequest, context: Context
    ) -> pb.BackfillScheduleResponse:
        name, request_id = check_id(request.name, "name"), convert.request_id(request)
        begin, end = (_moment(request, field) for field in ("begin_time", "end_time"))
        fires = await self._schedules.backfill(require_user(), name, begin, end, request_id)
        return pb.BackfillScheduleResponse(fires=fires)

    async def DeleteSchedule(self, request: pb.DeleteScheduleRequest, context: Context) -> pb.DeleteScheduleResponse:
        await self._ledger.delete(require_user(), check_id(request.name, "name"))
        return pb.DeleteScheduleResponse()


def _moment(request: pb.BackfillScheduleRequest, field: Literal["begin_time", "end_time"]) -> datetime:
    time: Timestamp = getattr(request, field)
    with suppress(ValueError, OverflowError):
        if request.HasField(field):
            return time.ToDatetime(tzinfo=UTC)
    raise InvalidField(f"{field} is required, and from the year 1 to 9999", field=field)
