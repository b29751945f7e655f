"""Sub-agent runs (TOOL-7), over the real rules of the loop and the ledger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from pawl.agent_loop.agents.rules import AgentDefinition, ToolSelection
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.delegation import OUTPUT_BYTES_MAX
from pawl.agent_loop.loop.rules.fact import Cancel
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.options import AskedOptions
from pawl.agent_loop.loop.rules.run import PinnedAgent, Run, RunOptions
from pawl.agent_loop.model.request import ModelRequest
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import ConversationId, RunId, RunKey, StoreId, UserId
from pawl.errors import DependencyUnavailable, LeaseLost, RunEnded
from pawl.values import ENDED, CallState, RunState, StopCause, WaitKind
from tests.fakes.loop_world import LEASE_SECONDS, STORE, USER, World, logged_states
from tests.fakes.model import Script, calls, fails, says
from tests.fakes.registry import tool
from tests.unit.agent_loop.scenario import present

VERDICTS = {
    "look": tool(effect="READ_ONLY", parallel=True),
    "mail": tool("APPROVE", digest="ab" * 32),
    "run_agent": tool("DELEGATE", context="AGENT", effect="IDEMPOTENT"),
}


def agent(task: str, **more: object) -> str:
    return f"run_agent {json.dumps({'task': task, **more})}"


def world_of(**scripts: list[Script]) -> World:
    """Return a world in which the run with a task gets these scripts, one per round."""
    world = World(VERDICTS, [])

    def reply(request: ModelRequest) -> Script:
        asked = next(message["content"] for message in request.messages if message["role"] == "user")
        answered = sum(message["role"] == "assistant" for message in request.messages)
        script = scripts[asked.replace(" ", "_")]
        return script[answered] if answered < len(script) else says("That is all.")

    world.model.reply = reply
    return world


def child_of(world: World, key: RunKey, index: int = 0) -> Run:
    call = [call for call in world.ledger.calls(key) if call.child_run_id][index]
    return world.ledger.run(RunKey(key.store_id, RunId(call.child_run_id)))


def key_of(run: Run) -> RunKey:
    return RunKey(StoreId(run.store_id), RunId(run.run_id))


async def finish(world: World, key: RunKey, *, until: Callable[[], bool] = lambda: False) -> None:
    for _ in range(100):
        if world.ledger.run(key).state in ENDED or until():
            return
        with suppress(LeaseLost, RunEnded, TimeoutError, DependencyUnavailable):
            async with asyncio.timeout(LEASE_SECONDS * 3):
                await world.drive()
        for run_key in list(world.ledger.tables.runs):
            await world.respond(run_key)
    raise AssertionError(f"the run does not end: {world.ledger.run(key)}")


async def played(world: World, text: str, options: RunOptions | None = None, **more: Any) -> RunKey:
    """Start a run with a message, wait until it has ended, and return it."""
    key = world.ledger.submit(text, options, **more)
    await finish(world, key)
    return key


def the_call(world: World, key: RunKey) -> Call:
    (call,) = world.ledger.calls(key)
    return call


async def test_the_answer_of_the_agent_is_the_result_of_the_call() -> None:
    world = world_of(top=[calls(agent("part")), says("Done.")], part=[calls("look"), says("It is blue.")])
    key = await played(world, "top")

    run, call, child = world.ledger.run(key), the_call(world, key), child_of(world, key)
    assert (run.state, run.output_text) == (RunState.COMPLETED, "Done.")
    answer = json.loads(present(call.result).content_json)
    assert (call.state, answer) == (CallState.SUCCEEDED, {"answer": "It is blue."})
    assert (child.parent_run_id, child.parent_call_id, child.depth) == (run.run_id, call.call_id, 1)
    assert child.conversation_id != run.conversation_id
    assert [message.text for message in world.ledger.messages(key_of(child))][:1] == ["part"]
    assert [above.conversation_id for above in child.above] == [run.conversation_id]
    assert WaitKind.AGENT not in run.waits
    assert logged_states(world.ledger.log(key)) == ["QUEUED", "RUNNING", "WAITING", "RUNNING", "COMPLETED"]


@pytest.mark.parametrize("depth_max", [0, 1, 2])
async def test_agents_can_start_agents_only_up_to_the_depth_limit(depth_max: int) -> None:
    world = world_of(
        **{name: [calls(agent(below)), says(name)] for name, below in (("a", "b"), ("b", "c"), ("c", "d"), ("d", "e"))}
    )

    await played(world, "a", RunOptions(limits=Limits(agent_depth_max=depth_max)))

    runs = [world.ledger.run(run_key) for run_key in world.ledger.tables.runs]
    assert [(run.depth, run.state, "run_agent" in [tool.name for tool in run.tools]) for run in runs] == [
        (depth, RunState.COMPLETED, depth < depth_max) for depth in range(depth_max + 1)
    ]
    (refused,) = world.ledger.calls(key_of(runs[-1]))
    assert present(refused.result).error_reason == "NOT_ALLOWED"


def test_the_reporting_conversations_rules_apply_to_child_runs() -> None:
    job = Run(
        store_id=StoreId(STORE),
        user_id=UserId(USER),
        conversation_id=ConversationId("conv_job"),
        run_id=RunId("run_job"),
        reports_to_conversation_id=ConversationId("conv_user"),
    )
    (above,) = job.chain
    assert (above.run_id, above.conversation_id) == ("run_job", "conv_user")


async def test_a_sub_agent_never_has_more_tools_than_its_parent() -> None:
    given = calls(agent("part", tool_names=["look"], instructions="Be brief.", rounds_max=3))
    world = world_of(top=[given, calls(agent("more", tool_names=["shell"]))], part=[says("Yes.")])
    key = await played(world, "top", RunOptions(model="m", instructions="Be kind.", tool_names=("look", "run_agent")))

    child = child_of(world, key)
    assert [tool.name for tool in child.tools] == ["look"]
    assert (child.options.instructions, child.options.limits.rounds_max, child.options.model) == (
        "Be kind.\n\nBe brief.",
        3,
        "m",
    )
    refused = world.ledger.calls(key)[1]
    assert (refused.state, refused.child_run_id) == (CallState.FAILED, "")
    assert "shell" in present(refused.result).content_json.decode()


async def test_a_failed_sub_agent_gives_the_model_an_error_result() -> None:
    failing = fails("HTTP_400", retryable=False, after=says("Half an ")[:1])
    world = world_of(top=[calls(agent("part")), says("Never mind.")], part=[failing])
    key = await played(world, "top")

    call, run = the_call(world, key), world.ledger.run(key)
    assert (run.state, run.output_text) == (RunState.COMPLETED, "Never mind.")
    assert (call.state, present(call.result).error_reason) == (CallState.FAILED, "AGENT_FAILED")
    assert "The model server failed." in present(call.result).content_json.decode()


@pytest.mark.parametrize("busy_with", ["a tool", "its model", "a run of its own"])
async def test_a_sub_agent_stops_with_its_caller(busy_with: str) -> None:
    """It stops immediately, because it would otherwise cost money and have side effects."""

    stuck: list[Script] = [[*says("Once upon a time", chunks=8)[:4], 60.0]]
    part = {"a tool": [calls("look")], "its model": stuck, "a run of its own": [calls(agent("deep"))]}[busy_with]
    world = world_of(top=[calls(agent("part"))], part=part, deep=stuck)
    world.registry.seconds = 60.0
    key = world.ledger.submit("top")
    worker = world.worker()
    loops = [asyncio.create_task(loop()) for loop in (worker.claim_forever, worker.renew_forever)]
    await asyncio.sleep(10.0)
    assert world.registry.running + world.model.streaming == 1
    await world.ledger.send(key, Cancel(cause=StopCause.USER))
    # Renewals find commands here, one level after the other.
    await asyncio.sleep(8.0)
    assert world.registry.running + world.model.streaming == 0
    assert {run.state.name for run in world.ledger.tables.runs.values()} == {"CANCELLED"}
    for loop in loops:
        loop.cancel()
    await worker.hand_over()


# Runs that give tasks to named agents.


ANN = Principal(store_id=StoreId(STORE), user_id=UserId(USER))


async def agents_of(world: World, **definitions: AgentDefinition) -> None:
    """Save agents, delegates first. Each agent selects the tools that it names."""
    for definition in definitions.values():
        await world.agents.put(ANN, definition, definition.tools.names, draft=False, validate_only=False)


def clerk(
    name: str, *tools: str, to: tuple[str, ...] = (), roles: tuple[str, ...] = (), **fields: Any
) -> AgentDefinition:
    return AgentDefinition(
        name=name,
        options=AskedOptions(**fields),
        tools=ToolSelection(names=tools),
        delegates_to=to,
        allowed_roles=roles,
    )


async def test_a_call_may_name_a_delegate_of_its_agent() -> None:
    """The delegate uses its own tools and the smaller of the limits."""

    world = world_of(
        top=[calls(agent("part", agent="b", instructions="Be quick.")), says("Done.")], part=[calls("mail")]
    )
    counter = clerk("b", "mail", instructions="Send it.", limits={"rounds_max": 7, "run_timeout_seconds": 9.0})
    await agents_of(world, b=counter, a=clerk("a", "look", "run_agent", to=("b",)))
    options = RunOptions(tool_names=("look", "run_agent"), instructions="Look.", limits=Limits(rounds_max=5))
    key = await played(world, "top", options, agent=PinnedAgent(name="a", version=1))

    child = child_of(world, key)
    assert [[call.agent_name for call in world.ledger.calls(each)] for each in (key, key_of(child))] == [["a"], ["b"]]
    assert child.agent == PinnedAgent(name="b", version=1, gives_tools=True)
    assert ([tool.name for tool in child.tools], child.options.instructions) == (["mail"], "Send it.\n\nBe quick.")
    assert (child.options.limits.rounds_max, child.options.limits.run_timeout_seconds) == (5, 9.0)
    assert world.ledger.run(key).output_text == "Done."


@pytest.mark.parametrize("named", ["b", "c", "gone", "closed", "nobody"])
async def test_an_unavailable_delegate_gives_the_model_an_error_result(named: str) -> None:
    world = world_of(top=[calls(agent("part", agent=named)), says("Done.")])
    closed = clerk("closed", roles=("boss",))
    to = ("gone", "closed")
    await agents_of(world, c=clerk("c"), gone=clerk("gone"), closed=closed, a=clerk("a", to=to), b=clerk("b"))
    await world.agents.repository.delete(ANN.store_id, "gone", ANN.user_id, ANN.credential_id)
    pinned = None if named == "b" else PinnedAgent(name="a", version=1)
    key = await played(world, "top", agent=pinned)

    call = the_call(world, key)
    assert (call.state, call.child_run_id, present(call.result).error_reason) == (CallState.FAILED, "", "NOT_ALLOWED")
    assert ("You may delegate to: gone, closed" in present(call.result).content_json.decode()) is (pinned is not None)
    assert world.ledger.run(key).state is RunState.COMPLETED


async def test_a_long_answer_is_truncated_and_a_call_without_a_task_is_refused() -> None:
    long = [says("\x01" * 3 * OUTPUT_BYTES_MAX)]
    world = world_of(top=[calls(agent("part")), calls(agent(" "))], part=long)
    key = await played(world, "top")
    result, refused = (present(call.result) for call in world.ledger.calls(key))
    assert len(json.loads(result.content_json)["answer"]) == OUTPUT_BYTES_MAX
    assert (len(result.content_json) < 1024 * 1024, "first part" in result.note) == (True, True)
    assert refused.error_reason == "INVALID_ARGUMENTS"


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_draft_delegates_according_to_its_own_definition(*, is_there: bool) -> None:
    """A run keeps the definition of its draft, which is not stored."""
    world = world_of(top=[calls(agent("part", agent="b")), says("Done.")], part=[says("Yes.")])
    await agents_of(world, b=clerk("b"))
    await world.agents.put(ANN, clerk("d", to=("b",)), (), draft=True, validate_only=False)
    key = world.ledger.submit("top", agent=PinnedAgent(name="draft/d", version=1))
    if not is_there:
        await world.agents.repository.delete_draft(ANN.store_id, ANN.user_id, "d")
    await finish(world, key)
    call = the_call(world, key)
    assert (call.state, bool(call.child_run_id)) == (CallState.SUCCEEDED if is_there else CallState.FAILED, is_there)
