"""Budgets of agents: once their runs have used up what they may in a day, no model call begins (I18)."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from pawl.agent_loop.app.agent_quotas import ENOUGH_SECONDS_MAX, NONE_SECONDS_MAX, AgentQuotas
from pawl.agent_loop.app.drive import Left
from pawl.agent_loop.domain.agents import AgentDefinition, AgentQuota, ToolSelection
from pawl.agent_loop.domain.event import Warned
from pawl.agent_loop.domain.run import PinnedAgent, RunOptions, RunState, TokenBudgetPolicy, WaitKind
from pawl.chassis.ids import RunKey, StoreId
from pawl.errors import MethodNotFound
from tests.fakes.ledger import STORE
from tests.fakes.loop_world import World
from tests.fakes.model import Script, calls, says
from tests.unit.agent_loop.scenario import VERDICTS
from tests.unit.agent_loop.test_agents_by_name import ANN

CLERK = PinnedAgent(name="clerk", version=1)


async def give(world: World, tokens: int) -> None:
    definition = AgentDefinition(name="clerk", tools=ToolSelection(names=("look",)), daily_tokens_max=tokens)
    await world.agents.put_agent(ANN, definition, ("look",), validate_only=False)


def use(world: World, tokens: int) -> None:
    world.agents.usage.tokens_today[StoreId(STORE), "clerk"] = tokens


def submit(world: World, policy: TokenBudgetPolicy = TokenBudgetPolicy.WAIT) -> RunKey:
    world.agents.usage.day_end_time = world.ledger.time() + timedelta(hours=1)
    return world.ledger.submit("hello", RunOptions(token_budget_policy=policy), agent=CLERK)


async def test_a_run_whose_agent_has_nothing_left_waits_for_the_next_day() -> None:
    world = World(VERDICTS, [says("Done.")])
    await give(world, 100)
    use(world, 100)
    key = submit(world)

    assert await world.drive() is Left.PARKED

    run, row = world.ledger.run(key), world.ledger.row(key)
    assert (run.state, run.waits, len(world.model.requests)) == (RunState.WAITING, (WaitKind.AGENT_QUOTA,), 0)
    waits = [300, 1200, 2100]
    day_end = world.agents.usage.day_end_time
    for seconds in waits:
        row = world.ledger.row(key)
        assert row.claim_at is not None
        assert abs((row.claim_at - world.ledger.time()).total_seconds() - seconds) < 1
        if seconds != waits[-1]:
            await world.drive()
    assert world.ledger.row(key).claim_at == day_end
    (warned,) = [event for event in world.ledger.events(key) if isinstance(event, Warned)]
    assert warned.reason == "AGENT_QUOTA_EXHAUSTED"
    # The next day has begun.
    use(world, 0)
    assert await world.drive() is Left.ENDED
    assert world.ledger.time() >= world.agents.usage.day_end_time
    assert world.ledger.run(key).output_text == "Done."
    assert len(world.model.requests) == 1


async def test_a_run_may_ask_to_fail_instead() -> None:
    world = World(VERDICTS, [says("Done.")])
    await give(world, 100)
    use(world, 101)
    key = submit(world, TokenBudgetPolicy.FAIL)
    await world.finish(key)
    run = world.ledger.run(key)
    assert run.state is RunState.FAILED
    assert run.failure is not None
    assert run.failure.reason == "AGENT_QUOTA_EXHAUSTED"


@pytest.mark.parametrize("reads_at_once", [False, True])
async def test_what_the_model_has_asked_for_still_runs_and_the_next_call_of_the_model_waits(
    reads_at_once: bool,
) -> None:
    world = World(VERDICTS, [])
    await give(world, 100)
    key = submit(world)
    world.registry.reads_at_once = reads_at_once

    def reply(_: object) -> Script:
        use(world, 100)
        return calls('look {"n":1}')

    world.model.reply = reply

    assert await world.drive() is Left.PARKED

    assert world.ledger.run(key).waits == (WaitKind.AGENT_QUOTA,)
    assert [call.settled for call in world.ledger.calls(key)] == [True]
    assert len(world.model.requests) == 1


@dataclass
class Reader:
    """Reads a budget, and counts how often."""

    quota: AgentQuota = field(default_factory=AgentQuota)
    error: Exception | None = None
    asked: list[Any] = field(default_factory=list)

    async def read(self, store_id: StoreId, name: str) -> AgentQuota:
        self.asked.append((store_id, name))
        if self.error is not None:
            raise self.error
        return self.quota


async def test_that_there_is_none_is_remembered_for_a_moment() -> None:
    world = World(VERDICTS, [])
    run = world.ledger.run(submit(world))
    quotas, reader = AgentQuotas(), Reader()
    assert quotas.must_be_read(run, 0, 100.0)
    assert await quotas.read(run, reader.read, 100.0) == AgentQuota()
    assert not quotas.must_be_read(run, 10**9, 99.9 + NONE_SECONDS_MAX)
    assert quotas.must_be_read(run, 0, 100.0 + NONE_SECONDS_MAX)
    assert reader.asked == [(STORE, "clerk")]


async def test_what_is_used_is_remembered_for_a_moment_while_there_is_enough_left() -> None:
    world = World(VERDICTS, [])
    run = world.ledger.run(submit(world))
    quotas, reader = AgentQuotas(), Reader(AgentQuota(tokens_max=1000, tokens_used=900))
    await quotas.read(run, reader.read, 100.0)
    assert quotas.must_be_read(run, 0, 100.0), "90 % are used"
    reader.quota = AgentQuota(tokens_max=1000, tokens_used=800)
    await quotas.read(run, reader.read, 100.0)
    assert not quotas.must_be_read(run, 60, 99.9 + ENOUGH_SECONDS_MAX)
    assert quotas.must_be_read(run, 0, 100.0 + ENOUGH_SECONDS_MAX)
    assert quotas.must_be_read(run, 40, 100.1), "its own runs have used the rest"


async def test_beside_a_ledger_of_the_version_before_there_are_none() -> None:
    """I23."""
    world, reader = World(VERDICTS, []), Reader(error=MethodNotFound())
    run = world.ledger.run(submit(world))
    assert not (await AgentQuotas().read(run, reader.read, 0.0)).is_used_up
