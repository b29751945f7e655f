"""What comes with a claim, who begins with it, and when a worker claims."""

from __future__ import annotations

import asyncio
from collections import Counter

from pawl.agent_loop.app.drive import Drive, Left
from pawl.agent_loop.app.ports import Loaded
from pawl.agent_loop.app.worker import WorkerLimits
from pawl.agent_loop.domain.step import Step
from pawl.errors import DependencyUnavailable
from tests.fakes.loop_world import World
from tests.fakes.model import calls
from tests.unit.agent_loop.scenario import VERDICTS, at_work, end_of
from tests.unit.agent_loop.test_jobs import Story, background
from tests.unit.agent_loop.test_worker import Hopeless


async def test_what_came_with_a_claim_is_nothing_to_a_drive_that_follows_another_one() -> None:
    """The answer to the claim comes when a drive that a renewal began has written steps, and has crashed."""

    world = World(VERDICTS, [])
    key = world.ledger.submit("hello")
    brought: list[Loaded | None] = []

    class Crashing(Drive):
        async def run(self, loaded: Loaded | None = None) -> Left:
            brought.append(loaded)
            if len(brought) > 1:
                return await super().run(loaded)
            await world.ledger.commit(self.claim, "cmt_0", Step(active_seconds=3.0))
            raise ZeroDivisionError

    async def fault(name: str, done: bool) -> None:
        if name == "ClaimRuns" and done and not brought:
            await asyncio.sleep(3.0)
        if name == "ReportCrash":
            raise DependencyUnavailable

    world.ledger.fault = fault
    worker = world.worker(
        new_drive=lambda claim: Crashing(claim, world.dependencies),
        ending_drive=lambda claim: Hopeless(claim, world.dependencies),
    )
    async with at_work(worker):
        await end_of(world, key)
    assert brought == [None, None]
    assert world.ledger.run(key).active_seconds >= 3.0


async def test_an_iteration_that_only_reads_is_a_claim_a_check_and_a_step() -> None:
    """Ten thousand series cost what their iterations cost: nothing is asked twice, or in vain."""

    story = Story(calls(background("look", _interval=60, _stopAfter=20, _reports="none")), seconds=0.01)
    story.world.registry.reads_at_once = True
    asked: Counter[str] = Counter()

    async def count(method: str, done: bool) -> None:
        if done and method != "RenewLeases" and story.jobs and 5 <= story.jobs[0].round < 15:
            asked[method] += 1

    story.world.ledger.fault = count
    story.limits = WorkerLimits(poll_seconds=600.0)
    story.say("watch it")
    await story.until(lambda: bool(story.jobs) and story.jobs[0].round >= 15)
    assert asked == {"ClaimRuns": 10, "CommitRun": 10}
    assert not story.world.registry.asked, "nothing is executed that was read with its check"
    assert story.world.registry.effects.total() == 15


async def test_what_falls_due_while_a_claim_is_under_way_is_claimed_next() -> None:
    """The claim may have looked before: without another one it would be found by the next poll only."""

    both = [background("look", _interval=seconds, _stopAfter=5, _reports="none") for seconds in (60, 61)]
    story = Story(calls(*both), seconds=0.01)
    story.limits = WorkerLimits(poll_seconds=600.0)

    async def slow(method: str, done: bool) -> None:
        if method == "ClaimRuns" and done:
            await asyncio.sleep(3.0)

    story.world.ledger.fault = slow
    story.say("watch them")
    await story.until(lambda: story.is_over)
    for job in story.jobs:
        assert job.job is not None
        late = [
            (call.create_time or 0) - job.job.begin_time - job.job.interval_seconds * (call.round - 1)
            for call in story.calls(job)
        ]
        assert all(seconds < 10 for seconds in late), late
