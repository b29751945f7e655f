"""pawl.agent.v1.ScheduleService: requests to use cases, what they return to responses."""

from __future__ import annotations

from typing import cast

from pawl.agent.v1 import schedule_pb2 as pb
from pawl.agent.v1 import schedule_pb2_grpc
from pawl.agent_loop.app.public_values import ScheduledMessage
from pawl.agent_loop.app.schedules import Schedules
from pawl.agent_loop.rpc import convert
from pawl.chassis.auth import require_user
from pawl.chassis.ids import check_id
from pawl.chassis.rpc_kinds import Context
from pawl.event.v1 import schedule_pb2


class ScheduleServicer(schedule_pb2_grpc.ScheduleServiceServicer):
    """Serves users. Store and user come from their credential alone."""

    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules

    async def CreateSchedule(self, request: pb.CreateScheduleRequest, context: Context) -> pb.CreateScheduleResponse:
        return pb.CreateScheduleResponse(schedule=await self._save(request.definition, must_exist=False))

    async def UpdateSchedule(self, request: pb.UpdateScheduleRequest, context: Context) -> pb.UpdateScheduleResponse:
        return pb.UpdateScheduleResponse(schedule=await self._save(request.definition, must_exist=True))

    async def _save(self, definition: schedule_pb2.ScheduleDefinition, *, must_exist: bool) -> schedule_pb2.Schedule:
        check_id(definition.name, "definition.name")
        scheduled = ScheduledMessage(
            text=definition.text,
            agent=definition.agent,
            labels=definition.labels,
            conversation_key=definition.conversation_key,
        )
        saved = await self._schedules.save(require_user(), definition, scheduled, must_exist=must_exist)
        return _schedule(saved)

    async def GetSchedule(self, request: pb.GetScheduleRequest, context: Context) -> pb.GetScheduleResponse:
        found = await self._schedules.get(require_user(), check_id(request.name, "name"))
        return pb.GetScheduleResponse(schedule=_schedule(found))

    async def ListSchedules(self, request: pb.ListSchedulesRequest, context: Context) -> pb.ListSchedulesResponse:
        return pb.ListSchedulesResponse(schedules=map(_schedule, await self._schedules.list(require_user())))

    async def PauseSchedule(self, request: pb.PauseScheduleRequest, context: Context) -> pb.PauseScheduleResponse:
        name = check_id(request.name, "name")
        paused = await self._schedules.pause(require_user(), name, request.note, paused=True)
        return pb.PauseScheduleResponse(schedule=_schedule(paused))

    async def ResumeSchedule(self, request: pb.ResumeScheduleRequest, context: Context) -> pb.ResumeScheduleResponse:
        resumed = await self._schedules.pause(require_user(), check_id(request.name, "name"), paused=False)
        return pb.ResumeScheduleResponse(schedule=_schedule(resumed))

    async def TriggerSchedule(self, request: pb.TriggerScheduleRequest, context: Context) -> pb.TriggerScheduleResponse:
        name = check_id(request.name, "name")
        fire = await self._schedules.trigger(require_user(), name, convert.request_id(request))
        return pb.TriggerScheduleResponse(fire=cast("schedule_pb2.ScheduleFire", fire))

    async def DeleteSchedule(self, request: pb.DeleteScheduleRequest, context: Context) -> pb.DeleteScheduleResponse:
        await self._schedules.delete(require_user(), check_id(request.name, "name"))
        return pb.DeleteScheduleResponse()


def _schedule(document: object) -> schedule_pb2.Schedule:
    return cast("schedule_pb2.Schedule", document)
