"""pawl.agent.v1.ScheduleService: what needs agents. Its other methods are forwarded to job-store."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, Literal

from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent.v1 import schedule_pb2 as pb
from pawl.agent_loop.api import convert
from pawl.agent_loop.schedules.schedules import Schedules
from pawl.agent_loop.schedules.starting import Starting
from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import check_id
from pawl.chassis.rpc.kinds import Context
from pawl.chassis.rpc.server import Forward
from pawl.errors import InvalidField

_SERVICE: Final = "/pawl.agent.v1.ScheduleService"


class ScheduleServicer:
    """Serves users. Store and user come from their credential alone."""

    def __init__(self, schedules: Schedules, starting: Starting, forward: Forward) -> None:
        self._schedules = schedules
        self._starting = starting
        self._forward = forward

    async def CreateSchedule(self, request: pb.CreateScheduleRequest, context: Context) -> pb.CreateScheduleResponse:
        await self._starting.check(require_user(), request.definition)
        response = await self._forward(f"{_SERVICE}/CreateSchedule", request.SerializeToString())
        return pb.CreateScheduleResponse.FromString(response)

    async def UpdateSchedule(self, request: pb.UpdateScheduleRequest, context: Context) -> pb.UpdateScheduleResponse:
        await self._starting.check(require_user(), request.definition)
        response = await self._forward(f"{_SERVICE}/UpdateSchedule", request.SerializeToString())
        return pb.UpdateScheduleResponse.FromString(response)

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


def _moment(request: pb.BackfillScheduleRequest, field: Literal["begin_time", "end_time"]) -> datetime:
    time: Timestamp = getattr(request, field)
    with suppress(ValueError, OverflowError):
        if request.HasField(field):
            return time.ToDatetime(tzinfo=UTC)
    raise InvalidField(f"{field} is required, and from the year 1 to 9999", field=field)
