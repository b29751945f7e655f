"""The due time in the instructions of a scheduled run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent_loop.schedules.rpc import fire_note
from pawl.chassis.ids import RequestId
from pawl.event.v1.schedule_pb2 import ScheduleDefinition, ScheduleFire
from pawl.job.v1.schedules_pb2 import (
    DueSchedule,
    FireScheduleRequest,
    FireScheduleResponse,
    GetDueScheduleRequest,
    GetDueScheduleResponse,
)
from tests.fakes.manual_clock import ManualClock
from tests.unit.agent_loop.test_starters import ANN, Checks, ScheduleBook, firing_of

TIME = datetime(2026, 7, 6, 7, 0, tzinfo=UTC)


def report(time: datetime | None = TIME, time_zone: str = "Europe/Berlin") -> DueSchedule:
    due = DueSchedule(definition=ScheduleDefinition(name="report", time_zone=time_zone))
    if time is not None:
        due.expected_time.FromDatetime(time)
    return due


def test_a_scheduled_run_sees_its_delay_and_its_scheduled_time_with_zone() -> None:
    local, later = "2026-07-06T09:00:00+02:00 (Europe/Berlin)", TIME + timedelta(minutes=5)
    rows: list[tuple[DueSchedule, datetime, datetime | None, str]] = [
        (report(), TIME, None, f"due at {local}."),
        (report(), later, None, f"due at {local} and is 300 seconds late."),
        (report(None), later, TIME, f"for the scheduled time {local} in the past (a backfill)."),
        (report(None, ""), TIME, None, "by hand at 2026-07-06T07:00:00+00:00 (UTC)."),
    ]
    for fired, now, backfill_time, sentence in rows:
        text = fire_note(fired, now, backfill_time)
        assert text.startswith("This run belongs to the schedule report. ")
        assert text.endswith(sentence)


async def test_the_instructions_of_a_run_name_its_trigger(clock: ManualClock) -> None:
    instructions: list[str] = []

    class Book(ScheduleBook):
        async def GetDueSchedule(self, request: GetDueScheduleRequest) -> GetDueScheduleResponse:
            response = GetDueScheduleResponse(due=report())
            response.past_times.add().FromDatetime(TIME)
            return response

        async def FireSchedule(self, request: FireScheduleRequest) -> FireScheduleResponse:
            instructions.append(request.message.options.instructions)
            return FireScheduleResponse(fire=ScheduleFire())

    await firing_of(Book(), Checks({}), clock).backfill(ANN, "x", Timestamp(), Timestamp(), RequestId("r"))
    assert "backfill" in instructions[0]
