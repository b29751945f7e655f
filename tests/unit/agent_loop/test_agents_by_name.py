"""Runs that give tasks to agents by name, over the real rules of the loop and of the ledger."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.agent_loop.domain.agents import AgentDefinition, ToolSelection
from pawl.agent_loop.domain.call import CallState
from pawl.agent_loop.domain.limits import Limits
from pawl.agent_loop.domain.options import AskedOptions
from pawl.agent_loop.domain.run import PinnedAgent, RunOptions, RunState
from pawl.chassis.auth import Principal
from pawl.chassis.ids import StoreId, UserId
from tests.fakes.ledger import STORE, USER
from tests.fakes.loop_world import World
from tests.fakes.model import calls, says
from tests.unit.agent_loop.test_sub_agents import agent, child_of, finish, the_call, world_of

ANN = Principal(store_id=StoreId(STORE), user_id=UserId(USER))


async def agents_of(world: World, **said: AgentDefinition) -> None:
    """Save agents, those first to which others delegate; each selects the tools that it names."""
    for definition in said.values():
        await world.agents.put_agent(ANN, definition, definition.tools.names, validate_only=False)


def clerk(
    name: str, *tools: str, to: tuple[str, ...] = (), roles: tuple[str, ...] = (), **said: Any
) -> AgentDefinition:
    return AgentDefinition(
        name=name,
        options=AskedOptions(**said),
        tools=ToolSelection(names=tools),
        delegates_to=to,
        allowed_roles=roles,
    )


async def test_a_call_names_an_agent_to_which_that_of_its_run_delegates() -> None:
    """It has tools of its own, and limits that are the smaller ones."""

    world = world_of(
        top=[calls(agent("part", agent="b", instructions="Be quick.")), says("Done.")], part=[calls("mail")]
    )
    counter = clerk("b", "mail", instructions="Send it.", limits={"rounds_max": 7, "run_timeout_seconds": 9.0})
    await agents_of(world, b=counter, a=clerk("a", "look", "run_agent", to=("b",)))
    options = RunOptions(tool_names=("look", "run_agent"), instructions="Look.", limits=Limits(rounds_max=5))
    key = world.ledger.submit("top", options, agent=PinnedAgent(name="a", version=1))

    await finish(world, key)

    child = child_of(world, key)
    assert child.agent == PinnedAgent(name="b", version=1, gives_tools=True)
    assert [tool.name for tool in child.tools] == ["mail"]
    assert child.options.instructions == "Send it.\n\nBe quick."
    assert (child.options.limits.rounds_max, child.options.limits.run_timeout_seconds) == (5, 9.0)
    assert world.ledger.run(key).output_text == "Done."


@pytest.mark.parametrize("named", ["b", "c", "gone", "closed", "nobody"])
async def test_an_agent_that_may_not_be_given_tasks_is_an_error_for_the_model(named: str) -> None:
    world = world_of(top=[calls(agent("part", agent=named)), says("Done.")])
    closed = clerk("closed", roles=("boss",))
    to = ("gone", "closed")
    await agents_of(world, c=clerk("c"), gone=clerk("gone"), closed=closed, a=clerk("a", to=to), b=clerk("b"))
    await world.agents.delete_agent(ANN, "gone")
    pinned = None if named == "b" else PinnedAgent(name="a", version=1)
    key = world.ledger.submit("top", agent=pinned)

    await finish(world, key)

    call = the_call(world, key)
    assert (call.state, call.child_run_id) == (CallState.FAILED, "")
    assert call.result is not None
    assert call.result.error_reason == "NOT_ALLOWED"
    assert ("You may name: gone, closed" in call.result.content_json.decode()) is (pinned is not None)
    assert world.ledger.run(key).state is RunState.COMPLETED


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_draft_gives_tasks_as_it_says_when_it_is_asked(*, is_there: bool) -> None:
    """A run keeps what its draft said of itself, and the draft is not kept for it."""

    world = world_of(top=[calls(agent("part", agent="b")), says("Done.")], part=[says("Yes.")])
    await agents_of(world, b=clerk("b"))
    await world.agents.put_draft(ANN, clerk("d", to=("b",)), (), validate_only=False)
    key = world.ledger.submit("top", agent=PinnedAgent(name="draft/d", version=1))
    if not is_there:
        await world.agents.delete_draft(ANN, "d")

    await finish(world, key)

    call = the_call(world, key)
    assert call.state is (CallState.SUCCEEDED if is_there else CallState.FAILED)
    assert bool(call.child_run_id) is is_there
    assert world.ledger.run(key).output_text == "Done."
