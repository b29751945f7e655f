"""What comes with a claim, and who begins with it."""

from __future__ import annotations

import asyncio

from pawl.agent_loop.app.drive import Drive, Left
from pawl.agent_loop.app.ports import Loaded
from pawl.agent_loop.domain.step import Step
from pawl.chassis.ids import WorkerId
from pawl.errors import DependencyUnavailable
from tests.fakes import virtual_time
from tests.fakes.loop_world import World
from tests.unit.agent_loop.scenario import VERDICTS, at_work, end_of
from tests.unit.agent_loop.test_worker import Hopeless


def test_what_came_with_a_claim_is_how_the_run_was_then() -> None:
    """The answer to a claim may come when a drive of the run has long begun, and reads the run again."""

    async def main() -> None:
        world = World(VERDICTS, [])
        world.ledger.submit("hello")
        ((claim, loaded),) = (await world.ledger.claim(WorkerId("worker"), runs_max=1, lease_seconds=10.0)).items()
        assert loaded is not None
        assert loaded.run.active_seconds == 0.0
        await world.ledger.commit(claim, "cmt_1", Step(active_seconds=3.0))
        assert (await world.ledger.load(claim)).run.active_seconds == 3.0

    virtual_time.run(main())


def test_what_came_with_a_claim_is_nothing_to_a_drive_that_follows_another_one() -> None:
    """The answer to the claim comes when a drive that a renewal began has written steps, and has crashed."""

    async def main() -> None:
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

    virtual_time.run(main())
