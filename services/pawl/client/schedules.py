"""The verbs of a client for schedules."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from pawl.agent.v1 import schedule_pb2 as pb
from pawl.client.target import Target
from pawl.event.v1 import schedule_pb2


class ScheduleVerbs(Target):
    """A suite that starts runs again and again, as its users see it."""

    async def create_schedule(self, definition: schedule_pb2.ScheduleDefinition) -> schedule_pb2.Schedule:
        """Make a schedule; the same one again is the same schedule."""
        return (
            await self.again(self.scheduler.CreateSchedule, pb.CreateScheduleRequest(definition=definition))
        ).schedule

    async def update_schedule(self, definition: schedule_pb2.ScheduleDefinition) -> schedule_pb2.Schedule:
        """Put a definition in the place of the one that the schedule of its name has."""
        return (
            await self.again(self.scheduler.UpdateSchedule, pb.UpdateScheduleRequest(definition=definition))
        ).schedule

    async def get_schedule(self, name: str) -> schedule_pb2.Schedule:
        """Return a schedule of yours with its next ten times and its last twenty fires."""
        return (await self.again(self.scheduler.GetSchedule, pb.GetScheduleRequest(name=name))).schedule

    async def list_schedules(self) -> Sequence[schedule_pb2.Schedule]:
        """Return your schedules by name, without their fires."""
        return (await self.again(self.scheduler.ListSchedules, pb.ListSchedulesRequest())).schedules

    async def pause_schedule(self, name: str, note: str = "") -> schedule_pb2.Schedule:
        """Pause a schedule; what would be due meanwhile is not made up for."""
        return (await self.again(self.scheduler.PauseSchedule, pb.PauseScheduleRequest(name=name, note=note))).schedule

    async def resume_schedule(self, name: str) -> schedule_pb2.Schedule:
        """Have a schedule go on, with the credential of this client."""
        return (await self.again(self.scheduler.ResumeSchedule, pb.ResumeScheduleRequest(name=name))).schedule

    async def trigger_schedule(self, name: str, *, request_id: str = "") -> schedule_pb2.ScheduleFire:
        """Fire a schedule now; the fire says what became of it."""
        request = pb.TriggerScheduleRequest(name=name, request_id=request_id)
        return (await self.once(self.scheduler.TriggerSchedule, request)).fire

    async def backfill_schedule(
        self, name: str, begin: datetime, end: datetime, *, request_id: str = ""
    ) -> Sequence[schedule_pb2.ScheduleFire]:
        """Fire a schedule for its due times of the past from `begin` on and before `end`, at most 100."""
        request = pb.BackfillScheduleRequest(name=name, request_id=request_id)
        request.begin_time.FromDatetime(begin.astimezone(UTC))
        request.end_time.FromDatetime(end.astimezone(UTC))
        return (await self.once(self.scheduler.BackfillSchedule, request)).fires

    async def delete_schedule(self, name: str) -> None:
        """Delete a schedule; its runs go on. Not made again by itself: the second time it is not found."""
        await self.scheduler.DeleteSchedule(pb.DeleteScheduleRequest(name=name))
