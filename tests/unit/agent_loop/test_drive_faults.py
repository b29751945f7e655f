"""A drive despite faults of the network, the provider and the process."""

from __future__ import annotations

import asyncio

import pytest

from pawl.agent_loop.loop.rules.fact import TAKEOVER, OutputDelta, RoundRetrying
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.run import RunOptions
from pawl.errors import DependencyUnavailable, Internal, LeaseLost, PawlError
from tests.fakes.loop_world import World, transient
from tests.fakes.model import says
from tests.unit.agent_loop.scenario import VERDICTS, at_each, check_whole, everything, present, shown_text


@pytest.mark.parametrize("done", [False, True], ids=["before it is applied", "after it is applied"])
@pytest.mark.parametrize(
    "error", [DependencyUnavailable, Internal, LeaseLost], ids=["unavailable", "internal", "lease lost"]
)
def test_any_commit_may_fail_before_or_after_it_is_applied(error: type[PawlError], *, done: bool) -> None:
    """I2, I4, I5: naive retries fail on commits that were applied and then reported as failed."""

    async def main(position: int) -> bool:
        world = everything()
        key = world.ledger.submit("hello")
        world.ledger.fault = transient(error, at=[position], name="CommitRun", done=done)
        await world.finish(key)
        check_whole(world, key)
        return position < len(world.ledger.steps)

    at_each(main, more_than=8)


async def test_a_takeover_in_mid_stream_voids_the_output_shown_so_far() -> None:
    """EVT-2, I8: the next attempt starts the answer again."""

    world = World(VERDICTS, [[*says("Once upon a time", chunks=8)[:4], 60.0], says("The whole story.", chunks=4)])
    key = world.ledger.submit("hello")
    first = asyncio.create_task(world.drive("first"))
    await asyncio.sleep(2.0)
    assert shown_text(world, key, 1) == "Once upo"
    first.cancel()
    await asyncio.wait([first])

    await world.finish(key)

    assert shown_text(world, key, 1) == "The whole story."
    (retrying,) = [event for event in world.ledger.events(key) if isinstance(event, RoundRetrying)]
    assert (retrying.reason, retrying.model_attempt) == (TAKEOVER, 1)
    deltas = [event for event in world.ledger.events(key) if isinstance(event, OutputDelta)]
    assert {delta.model_attempt for delta in deltas} == {1, 2}


def fails_inside(world: World, *, until: float, name: str = "") -> None:
    """Answer ledger requests with INTERNAL until a time; with `name`, only those with this name."""

    async def fault(request: str, done: bool) -> None:
        if world.clock.now() < until and name in {"", request}:
            raise Internal

    world.ledger.fault = fault
    world.ledger.loads_along = False


@pytest.mark.parametrize("name", ["LoadRun", "CommitRun", "ListCommands"])
async def test_a_run_survives_two_minutes_of_internal_ledger_errors(name: str) -> None:
    """Such errors occur while a database is read-only after a failover."""

    world = everything()
    key = world.ledger.submit("hello")
    fails_inside(world, until=world.clock.now() + 120.0, name=name)
    await world.finish(key)
    check_whole(world, key)


async def test_a_run_that_never_reached_the_registry_reports_it() -> None:
    world = everything()
    key = world.ledger.submit("hello", RunOptions(limits=Limits(run_timeout_seconds=20)))
    world.registry.unreachable = 10**6
    await world.finish(key)
    failure = present(world.ledger.run(key).failure)
    assert (failure.reason, "tool-registry is reachable" in failure.message) == ("RUN_TIMEOUT", True)
