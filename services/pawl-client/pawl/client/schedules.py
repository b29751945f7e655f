"""Client methods for schedules."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from pawl.agent.v1 import schedule_pb2 as pb
from pawl.client.target import Target
from pawl.event.v1 import schedule_pb2


class ScheduleVerbs(Target):
    async def create_schedule(self, definition: schedule_pb2.ScheduleDefinition) -> schedule_pb2.Schedule:
        """Create a schedule and return it. If an identical schedule already exists, return that one."""
        return (
            await self.again(self.scheduler.CreateSchedule, pb.CreateScheduleRequest(definition=definition))
        ).schedule

    async def update_schedule(self, definition: schedule_pb2.ScheduleDefinition) -> schedule_pb2.Schedule:
        """Replace the definition of the schedule with the same name."""
        return (
            await self.again(self.scheduler.UpdateSchedule, pb.UpdateScheduleRequest(definition=definition))
        ).schedule

    async def get_schedule(self, name: str) -> schedule_pb2.Schedule:
        """Return a schedule with its next 10 scheduled times and its last 20 firings."""
        return (await self.again(self.scheduler.GetSchedule, pb.GetScheduleRequest(name=name))).schedule

    async def list_schedules(self) -> Sequence[schedule_pb2.Schedule]:
        """Return your schedules, sorted by name, without their firings."""
        return (await self.again(self.scheduler.ListSchedules, pb.ListSchedulesRequest())).schedules

    async def pause_schedule(self, name: str, note: str = "") -> schedule_pb2.Schedule:
        """Pause a schedule. Scheduled times during the pause are skipped."""
        return (await self.again(self.scheduler.PauseSchedule, pb.PauseScheduleRequest(name=name, note=note))).schedule

    async def resume_schedule(self, name: str) -> schedule_pb2.Schedule:
        """Resume a schedule with this client's credential."""
        return (await self.again(self.scheduler.ResumeSchedule, pb.ResumeScheduleRequest(name=name))).schedule

    async def trigger_schedule(self, name: str, *, request_id: str = "") -> schedule_pb2.ScheduleFire:
        """Fire a schedule now. Return the firing with its outcome."""
        request = pb.TriggerScheduleRequest(name=name, request_id=request_id)
        return (await self.once(self.scheduler.TriggerSchedule, request)).fire

    async def backfill_schedule(
        self, name: str, begin: datetime, end: datetime, *, request_id: str = ""
    ) -> Sequence[schedule_pb2.ScheduleFire]:
        """Fire a schedule for each past scheduled time from `begin` (inclusive) to `end` (exclusive), at most 100."""
        request = pb.BackfillScheduleRequest(name=name, request_id=request_id)
        request.begin_time.FromDatetime(begin.astimezone(UTC))
        request.end_time.FromDatetime(end.astimezone(UTC))
        return (await self.once(self.scheduler.BackfillSchedule, request)).fires

    async def delete_schedule(self, name: str) -> None:
        """Delete a schedule. Its runs continue. Not retried, because a second attempt would raise ScheduleNotFound."""
        await self.scheduler.DeleteSchedule(pb.DeleteScheduleRequest(name=name))
