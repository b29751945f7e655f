"""Schedules through a whole suite of its own, with two replicas of job-store and of agent-loop that die."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

from pawl.agent.v1 import agents_pb2
from pawl.client import AsyncClient
from pawl.errors import AgentNotFound, InvalidField, TooLarge
from pawl.event.v1 import agent_pb2, run_pb2
from pawl.event.v1 import schedule_pb2 as pb
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

PATIENCE_SECONDS = 240.0
STARTED = pb.SCHEDULE_FIRE_OUTCOME_STARTED


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doubled() -> AsyncIterator[Suite]:
    with tempfile.TemporaryDirectory(prefix="pawl-schedules-") as folder:
        options = SuiteOptions(data=Path(folder), local_key=LOCAL_KEY, replicas={"agent-loop": 2, "job-store": 2})
        async with Suite(options) as suite:
            yield suite


@pytest_asyncio.fixture(loop_scope="module")
async def pawl(doubled: Suite) -> AsyncIterator[AsyncClient]:
    addresses = [replica.grpc for replica in doubled.endpoints.services["agent-loop"]]
    async with AsyncClient(addresses, api_key=LOCAL_KEY, retry_seconds=240.0, environment={}) as pawl:
        yield pawl


async def until(pawl: AsyncClient, name: str, check: Callable[[pb.Schedule], bool]) -> pb.Schedule:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not check(found := await pawl.get_schedule(name)):
            await asyncio.sleep(0.1)
    return found


def every_second(name: str, text: str = "what is 6 * 7?", **fields: object) -> pb.ScheduleDefinition:
    return pb.ScheduleDefinition(name=name, text=text, interval_seconds=1, **fields)  # type: ignore[arg-type]


async def test_each_due_time_has_one_fire_and_one_run_although_replicas_are_killed(
    doubled: Suite, pawl: AsyncClient
) -> None:
    names = [f"tick-{number}" for number in range(5)]
    for name in names:
        await pawl.create_schedule(every_second(name, overlap=pb.SCHEDULE_OVERLAP_ALLOW, labels={"of": name}))
    fired: dict[str, dict[int, pb.ScheduleFire]] = {name: {} for name in names}

    async def look(name: str) -> None:
        # Again and again: twenty fires are kept, and a busy machine takes longer than these.
        fired[name] |= {fire.due_time.seconds: fire for fire in (await pawl.get_schedule(name)).fires}

    async def each_has(count: int) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while min(map(len, fired.values())) < count:
                await asyncio.gather(*map(look, names))
                await asyncio.sleep(0.1)

    await each_has(3)
    doubled.kill("job-store", 0)
    await each_has(6)
    doubled.kill("agent-loop", 1)
    doubled.kill("job-store", 1)
    await each_has(9)
    for name in names:
        await pawl.pause_schedule(name)
        await look(name)
    database = await asyncpg.connect(doubled.database_url)
    try:
        for name in names:
            times = sorted(fired[name])
            fires = [fired[name][time] for time in times]
            assert times == list(range(times[0], times[0] + len(times)))
            assert [fire.outcome for fire in fires] == [STARTED] * len(fires)
            runs = await database.fetch("SELECT run_id FROM job_store.runs WHERE labels LIKE '%of=' || $1", name)
            assert {run["run_id"] for run in runs} == {fire.run_id for fire in fires}
            assert len(runs) == len(fires)
    finally:
        await database.close()
    await doubled.wait_ready("job-store", 0)
    await doubled.wait_ready("job-store", 1)
    await doubled.wait_ready("agent-loop", 1)
    assert (await pawl.result(fires[0].run_id)).state == run_pb2.RUN_STATE_COMPLETED


async def test_a_fire_is_skipped_while_the_run_before_waits_for_somebody(pawl: AsyncClient) -> None:
    await pawl.create_schedule(every_second("busy", "ask me which colour"))
    shown = await until(pawl, "busy", lambda schedule: len(schedule.fires) >= 3)
    *skipped, first = shown.fires
    assert [fire.outcome for fire in skipped] == [pb.SCHEDULE_FIRE_OUTCOME_SKIPPED] * len(skipped)
    await pawl.cancel(first.run_id)

    def another_has_begun(schedule: pb.Schedule) -> bool:
        # The first may be too old to be shown by now.
        return any(fire.outcome == STARTED and fire.run_id != first.run_id for fire in schedule.fires)

    await until(pawl, "busy", another_has_begun)
    await pawl.delete_schedule("busy")


async def test_a_schedule_that_is_paused_fires_when_it_is_resumed(pawl: AsyncClient) -> None:
    await pawl.create_schedule(every_second("rest"))
    await until(pawl, "rest", lambda schedule: len(schedule.fires) >= 1)
    await pawl.pause_schedule("rest", "holidays")
    before = await pawl.get_schedule("rest")
    fire = await pawl.trigger_schedule("rest")
    assert fire.triggered
    resumed = await pawl.resume_schedule("rest")
    after = await until(pawl, "rest", lambda schedule: len(schedule.fires) >= len(before.fires) + 2)
    late = after.fires[0]
    assert not late.triggered
    assert late.due_time.seconds >= resumed.next_time.seconds
    await pawl.delete_schedule("rest")


async def test_a_schedule_whose_agent_is_gone_fires_and_says_why_there_is_no_run(pawl: AsyncClient) -> None:
    definition = agent_pb2.AgentDefinition(name="clerk")
    await pawl.agent_register.UpdateAgent(agents_pb2.UpdateAgentRequest(definition=definition))
    await pawl.create_schedule(pb.ScheduleDefinition(name="gone", text="look", cron="0 0 1 1 *", agent="clerk"))
    await pawl.agent_register.DeleteAgent(agents_pb2.DeleteAgentRequest(name="clerk"))
    fire = await pawl.trigger_schedule("gone")
    assert (fire.outcome, fire.reason.partition(":")[0]) == (pb.SCHEDULE_FIRE_OUTCOME_REFUSED, "AGENT_NOT_FOUND")
    with pytest.raises(AgentNotFound):
        await pawl.update_schedule(pb.ScheduleDefinition(name="gone", text="look", cron="0 0 1 1 *", agent="clerk"))


async def test_due_times_of_the_past_are_backfilled_once(pawl: AsyncClient) -> None:
    await pawl.create_schedule(pb.ScheduleDefinition(name="past", text="what is 6 * 7?", cron="0 9 * * *"))
    await pawl.pause_schedule("past")
    begin, end = datetime(2026, 1, 5, tzinfo=UTC), datetime(2026, 1, 8, tzinfo=UTC)
    fires = await pawl.backfill_schedule("past", begin, end, request_id="again")
    assert [fire.due_time.ToDatetime(tzinfo=UTC) for fire in fires] == [
        datetime(2026, 1, day, 9, tzinfo=UTC) for day in (5, 6, 7)
    ]
    again = await pawl.backfill_schedule("past", begin, end, request_id="again")
    assert [fire.run_id for fire in again] == [fire.run_id for fire in fires]
    assert [(await pawl.result(fire.run_id)).output_text for fire in fires] == ["6 * 7 = 42."] * 3
    with pytest.raises(TooLarge):
        await pawl.backfill_schedule("past", begin - timedelta(days=200), end)
    await pawl.delete_schedule("past")


async def test_what_cannot_be_due_is_refused_with_the_place(pawl: AsyncClient) -> None:
    with pytest.raises(InvalidField, match="part 1, minute, cannot be '61'"):
        await pawl.create_schedule(pb.ScheduleDefinition(name="never", text="look", cron="61 * * * *"))
    with pytest.raises(TooLarge):
        await pawl.create_schedule(pb.ScheduleDefinition(name="never", text="a" * 20_000, cron="1 * * * *"))
    assert "never" not in [schedule.definition.name for schedule in await pawl.list_schedules()]
