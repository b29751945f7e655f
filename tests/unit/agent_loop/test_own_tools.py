"""A run's own tools are available only to that run."""

from __future__ import annotations

import pytest

from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.run import RunOptions, TokenBudgetPolicy, ToolChoice, ToolChoiceMode
from pawl.errors import LeaseLost
from pawl.values import CallState, OfferFallback, RunState
from tests.fakes.loop_world import World
from tests.fakes.model import calls, says
from tests.fakes.registry import own_tool, tool

SHOW = own_tool("show")
VERDICTS = {"look": tool(effect="READ_ONLY"), "mail": tool(), "run_agent": tool("DELEGATE", context="AGENT")}


def offered(world: World, request: int = 0) -> list[str]:
    return [function["function"]["name"] for function in world.model.requests[request].tools]


async def test_client_supplied_tools_are_checked_against_their_own_definition() -> None:
    world = World(VERDICTS, [calls("show", "look"), says("Done.")])
    key = world.ledger.submit("go", own_tools=[SHOW])
    await world.finish(key)
    assert offered(world) == ["show", "look", "mail", "run_agent"]
    assert [(call.tool_name, call.own_tool) for call in world.registry.checked] == [("show", SHOW), ("look", None)]
    run = world.ledger.run(key)
    assert run.state is RunState.COMPLETED
    assert [(each.name, each.definition_sha256) for each in run.tools][:2] == [
        ("show", SHOW.definition_sha256),
        ("look", ""),
    ]
    assert [note.definition_sha256 for note in world.registry.returned] == [SHOW.definition_sha256]


@pytest.mark.parametrize("names", [("look",), ("show", "look"), ("show",)])
async def test_tool_names_filter_only_registered_tools(names: tuple[str, ...]) -> None:
    world = World(VERDICTS, [says("Done.")])
    options = RunOptions(tool_names=names, tool_choice=ToolChoice(mode=ToolChoiceMode.TOOL, tool_name="show"))
    await world.finish(world.ledger.submit("go", options, own_tools=[SHOW]))
    assert offered(world) == ["show", *(name for name in names if name != "show")]


async def test_a_child_run_does_not_inherit_client_supplied_tools() -> None:
    world = World(VERDICTS, [calls('run_agent {"task":"part"}'), says("Part."), says("Done.")])
    key = world.ledger.submit("go", own_tools=[SHOW])
    for _ in range(3):
        try:
            await world.drive()
        except LeaseLost:
            continue
    (child,) = [row for row in world.ledger.tables.runs.values() if row.parent_run_id]
    assert child.own_tools is None
    assert "show" not in world.ledger.run(child.key).options.tool_names
    assert world.ledger.run(child.key).options.tool_names == ("look", "mail", "run_agent")
    assert world.ledger.run(key).own_tools is not None


@pytest.mark.parametrize(("description", "state"), [("Do it.", RunState.COMPLETED), ("x" * 20_000, RunState.FAILED)])
async def test_descriptions_of_client_supplied_tools_count_towards_the_budget(
    description: str, state: RunState
) -> None:
    world = World(VERDICTS, [says("Done.")])
    options = RunOptions(limits=Limits(total_tokens_max=3000), token_budget_policy=TokenBudgetPolicy.FAIL)
    key = world.ledger.submit("go", options, own_tools=[own_tool("show", description=description)])
    await world.finish(key)
    run = world.ledger.run(key)
    assert (run.state, len(world.model.requests)) == (state, int(state is RunState.COMPLETED))
    assert run.failure is None or run.failure.reason == "BUDGET_EXHAUSTED"


async def test_the_fallback_of_a_client_supplied_tool_is_pinned_with_it() -> None:
    panel = own_tool("panel", fallback="mail")
    world = World(VERDICTS, [calls("panel"), says("Done.")])
    options = RunOptions(tool_names=("look",), limits=Limits(offer_deadline_seconds=5))
    world.registry.own_verdict = tool(
        "OFFER", context="FRONTEND", offer_fallback=OfferFallback.BACKEND_TOOL, fallback_tool_name="mail"
    )
    key = world.ledger.submit("go", options, own_tools=[panel])
    while world.ledger.run(key).state is not RunState.COMPLETED:
        await world.drive()
    assert offered(world) == ["panel", "look"]
    (call,) = world.ledger.calls(key)
    assert (call.tool_name, call.proposed_tool_name, call.state) == ("mail", "panel", CallState.SUCCEEDED)
