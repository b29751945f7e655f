"""What a scheduled run is told of its due time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast

from msgspec.structs import replace

from pawl.agent_loop.app.public_values import DueSchedule
from pawl.agent_loop.app.schedules import told_of
from pawl.chassis.ids import RequestId
from tests.fakes.manual_clock import ManualClock
from tests.unit.agent_loop.test_starters import ANN, Checks, ScheduleBook, due, firing_of

TIME = datetime(2026, 7, 6, 7, 0, tzinfo=UTC)
DUE = replace(due("report"), name="report", time_zone="Europe/Berlin", expected_time=TIME)


def test_a_run_is_told_its_due_time_and_zone_and_whether_it_is_late_or_a_backfill() -> None:
    local, later = "2026-07-06T09:00:00+02:00 (Europe/Berlin)", TIME + timedelta(minutes=5)
    rows: list[tuple[DueSchedule, datetime, datetime | None, str]] = [
        (DUE, TIME, None, f"due at {local}."),
        (DUE, later, None, f"due at {local} and is 300 seconds late."),
        (replace(DUE, expected_time=None), later, TIME, f"for the due time {local} in the past (a backfill)."),
        (replace(DUE, expected_time=None, time_zone=""), TIME, None, "by hand at 2026-07-06T07:00:00+00:00 (UTC)."),
    ]
    for fired, now, backfill_time, told in rows:
        text = told_of(fired, now, backfill_time)
        assert text.startswith("This run belongs to the schedule report. ")
        assert text.endswith(told)


async def test_the_instructions_of_a_run_say_what_started_it(clock: ManualClock) -> None:
    instructions: list[str] = []

    class Book(ScheduleBook):
        async def past_times(self, *_: object) -> list[datetime]:
            return [TIME]

        async def fire_schedule(self, one: DueSchedule, message: object, **_: object) -> Any:
            instructions.append(cast("Any", message).options.instructions)
            return one

    await firing_of(Book(), Checks({}), clock).backfill(ANN, "x", TIME, TIME, RequestId("r"))
    assert "backfill" in instructions[0]
