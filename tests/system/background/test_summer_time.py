"""A schedule in the zone of its user, while the clocks there change: PostgreSQL finds itself at those times."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from pawl.event.v1 import schedule_pb2
from pawl.launcher import postgres
from pawl.tool.v1 import rule_pb2
from tests.chaos import clocks
from tests.poll import until
from tests.system.background.world import World, running
from tests.system.talk import PATIENCE_SECONDS

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

CHANGES: Final = (
    # Friday in winter, Monday in summer.
    (datetime(2027, 3, 26, 6, tzinfo=UTC), datetime(2027, 3, 29, 5, tzinfo=UTC)),
    # Friday in summer, Monday in winter.
    (datetime(2027, 10, 29, 5, tzinfo=UTC), datetime(2027, 11, 1, 6, tzinfo=UTC)),
)
SHORTLY: Final = timedelta(seconds=3)


class Clock:
    """The clock of a suite's database."""

    def __init__(self, world: World, folder: Path) -> None:
        self._world = world
        self._folder = folder

    def put(self, time: datetime) -> None:
        """Have it be that time, from which it goes on."""
        clocks.put(self._folder, self._world.suite.pid("postgres"), (time - datetime.now(UTC)).total_seconds())

    async def is_shown(self) -> datetime:
        """The time by the database."""
        (record,) = await self._world.database("SELECT now()")
        found: datetime = record["now"]
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clocked() -> AsyncIterator[tuple[World, Clock]]:
    with tempfile.TemporaryDirectory(prefix="pawl-summer-") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        folder.chmod(0o755)
        added = clocks.preload(folder)
        if added is None:
            pytest.skip("shifting the clock of a process needs Linux and a C compiler")
        plain = postgres._environment  # the only process of a suite that is given nothing
        patch.setattr(postgres, "_environment", lambda: {**plain(), **added})
        async with running(folder) as world:
            yield world, Clock(world, folder)


async def test_the_news_of_every_weekday_at_seven_in_oslo_come_at_seven_through_both_changes(
    clocked: tuple[World, Clock],
) -> None:
    """ASYNC-8: real fires, each with its run and its mail, by the clock of the database."""
    world, clock = clocked
    async with world.client() as pawl:
        rule = rule_pb2.Rule(
            effect=rule_pb2.RULE_EFFECT_ALLOW, scope=rule_pb2.RULE_SCOPE_USER, tool_name="send_email", reason="news"
        )
        await pawl.rules.CreateRule(rule_pb2.CreateRuleRequest(rule=rule))
        definition = schedule_pb2.ScheduleDefinition(
            name="news",
            text="e-mail ann@example.com about the news: Nothing has happened",
            cron="0 7 * * 1-5",
            time_zone="Europe/Oslo",
        )
        await pawl.create_schedule(definition)
        for change in CHANGES:
            # What would have been due meanwhile is not made up for.
            await pawl.pause_schedule("news")
            clock.put(change[0] - timedelta(minutes=5))
            await pawl.resume_schedule("news")
            for due in change:
                mails = len(world.postbox.envelopes)
                clock.put(due - SHORTLY)

                async def has_come(mails: int = mails) -> bool:
                    return len(world.postbox.envelopes) > mails

                await until(has_come, patience_seconds=PATIENCE_SECONDS)
                fire = (await pawl.get_schedule("news")).fires[0]
                assert fire.due_time.ToDatetime(tzinfo=UTC) == due
                assert due <= fire.fire_time.ToDatetime(tzinfo=UTC) <= await clock.is_shown()
                run = await pawl.result(fire.run_id)
                assert run.create_time.ToDatetime(tzinfo=UTC) >= due
            # Seven by the time before the change, or an hour later.
            clock.put(change[1] + timedelta(hours=2))
        schedule = await pawl.pause_schedule("news")
        found = await pawl.get_schedule(schedule.definition.name)
        fired = [fire.due_time.ToDatetime(tzinfo=UTC) for fire in reversed(found.fires)]
        assert fired == [due for change in CHANGES for due in change]
        assert {fire.outcome for fire in found.fires} == {schedule_pb2.SCHEDULE_FIRE_OUTCOME_STARTED}
        came = world.postbox.messages()
        assert [(mail["To"], mail["Subject"]) for mail in came] == [("ann@example.com", "the news")] * 4
        assert len({mail["Message-ID"] for mail in came}) == 4
