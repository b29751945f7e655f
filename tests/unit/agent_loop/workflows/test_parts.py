"""Nodes that consist of others: parallel branches, maps and other workflows."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.ports import CallContext
from pawl.agent_loop.loop.rules import loop_state
from pawl.agent_loop.loop.rules.call import CallResult
from pawl.agent_loop.loop.rules.message import Role
from pawl.agent_loop.loop.rules.run import PinnedWorkflow, Run, RunOptions
from pawl.agent_loop.loop.rules.tool import ExecutionPiece
from pawl.agent_loop.loop.worker import WorkerLimits
from pawl.agent_loop.workflows.drafting import items_of
from pawl.errors import DependencyUnavailable
from pawl.job.v1 import ledger_pb2
from pawl.values import ENDED, EffectClass, Execution, RunState, WaitKind
from tests.fakes.loop_world import STORE, USER, World
from tests.fakes.model import calls, says
from tests.fakes.registry import tool
from tests.unit.agent_loop.scenario import at_work, end_of, present, worked
from tests.unit.agent_loop.workflows.player import Player
from tests.unit.agent_loop.workflows.test_running import start

VERDICTS = {"work": tool(), "look": tool(effect=EffectClass.READ_ONLY), "fails": tool(), "slow": tool()}


def world_of(*scripts: Any, **results: Any) -> World:
    world = World(VERDICTS, list(scripts))
    world.registry.results["fails"] = CallResult(
        content_json=b'{"error":"broken"}', is_error=True, error_reason="TOOL_ERROR"
    )
    for name, value in results.items():
        world.registry.results[name] = CallResult(content_json=json.dumps(value).encode())
    return world


async def finished(world: World, nodes: dict[str, Any], given: Any = None, **more: Any) -> Run:
    key = start(world, nodes, given, **more)
    async with at_work(world.worker(limits=WorkerLimits(runs_max=16))):
        await end_of(world, key)
    return world.ledger.run(key)


def runs(world: World) -> list[Run]:
    return [world.ledger.run(key) for key in world.ledger.tables.runs]


async def test_parallel_node_cancels_the_rest_once_enough_have_succeeded() -> None:
    branches = {
        "quick": {"kind": "tool", "tool": "look"},
        "person": {"kind": "human", "question": "Well?"},
        "agent": {"kind": "agent", "task": "x"},
        "slow": {"kind": "tool", "tool": "slow"},
        "late": {"kind": "wait", "seconds": 5000},
    }
    nodes = {
        "some": {"kind": "parallel", "branches": branches, "require": "any"},
        "answer": {"kind": "output", "value": "${nodes.some.output}"},
    }
    world = world_of(calls('slow {"n":1}'), says("Done."), look=1)
    world.registry.reads_at_once = True
    world.registry.seconds = 5.0
    assert json.loads((await finished(world, nodes)).output_json) == {"quick": 1}
    assert all(call.settled for key in world.ledger.tables.runs for call in world.ledger.calls(key))
    assert {each.state for each in runs(world)} == {RunState.COMPLETED, RunState.CANCELLED}


async def test_parallel_node_fails_when_too_many_branches_have_failed() -> None:
    branches = {
        "a": {"kind": "tool", "tool": "fails"},
        "b": {"kind": "human", "question": "Well?"},
        "c": {"kind": "tool", "tool": "fails"},
    }
    nodes = {
        "some": {"kind": "parallel", "branches": branches, "require": 2, "on_error": "continue"},
        "answer": {"kind": "output", "value": "${nodes.some.error.reason}"},
    }
    assert (await finished(world_of(), nodes)).output_text == "TOOL_ERROR"


@pytest.mark.parametrize("count", [0, 1, 50, 51, 120])
async def test_map_returns_the_outputs_in_the_order_of_the_list(count: int) -> None:
    do = {"kind": "tool", "tool": "look", "arguments": {"n": "${item}", "i": "${index}", "x": "${nodes.first.output}"}}
    nodes = {
        "first": {"kind": "tool", "tool": "work"},
        "each": {"kind": "map", "items": "${input.items}", "do": do, "concurrency": 50},
        "answer": {"kind": "output", "value": "${nodes.each.output}"},
    }
    world = world_of(look="seen", work=9)
    run = await finished(world, nodes, {"items": list(range(100, 100 + count))})
    assert json.loads(run.output_json) == ["seen"] * count
    asked = [json.loads(call.arguments_json) for call in world.registry.checked if call.tool_name == "look"]
    assert sorted(asked, key=lambda each: each["i"]) == [{"n": 100 + i, "i": i, "x": 9} for i in range(count)]
    assert len(runs(world)) == 1 + -(-count // 50)


def test_chunks_of_a_map_overlap_and_divide_its_concurrency() -> None:
    each = {"kind": "map", "items": "${input.items}", "do": {"kind": "tool", "tool": "look"}, "concurrency": 5}
    nodes = {"each": {**each, "tolerate": 3}, "answer": {"kind": "output", "value": "${nodes.each.output}"}}
    player = Player({"name": "m", "nodes": nodes}, {"items": list(range(210))}, random.Random(1), crashes=0)

    def chunks() -> list[tuple[int, int]]:
        found = sorted((items_of(call) for call in player.state.open_calls), key=lambda each: each.first_index)
        assert sum(chunk.concurrency for chunk in found) == 5
        return [(chunk.first_index, chunk.concurrency) for chunk in found]

    assert chunks() == [(0, 2), (42, 2), (84, 1)]
    player.end_chunk(1, outputs=["b"], failed=2)
    assert chunks() == [(0, 2), (84, 1), (126, 2)]
    opened = {items_of(call).first_index: items_of(call).failures_max for call in player.state.open_calls}
    assert opened == {0: 3, 84: 3, 126: 1}
    for number, output in [(3, "d"), (2, "c"), (4, "e"), (0, "a")]:
        player.end_chunk(number, outputs=[output])
    assert json.loads(player.state.run.output_json) == ["a", "b", "c", "d", "e"]


def test_map_fails_once_its_chunks_together_have_too_many_failures() -> None:
    nodes = {"each": {"kind": "map", "items": "${input}", "do": {"kind": "tool", "tool": "look"}, "tolerate": 3}}
    player = Player({"name": "m", "nodes": nodes}, list(range(210)), random.Random(1), crashes=0)
    player.end_chunk(2, outputs=["c"], failed=2, reason="SLOW")
    player.end_chunk(1, outputs=["b"], failed=2, reason="TOOL_ERROR")
    failure = present(player.state.run.failure)
    assert (player.state.run.state, failure.reason) == (RunState.FAILED, "TOOL_ERROR")
    assert failure.message == "Node each: 4 items failed; at most 3 may fail."


async def test_runs_of_a_map_refer_to_the_values_that_they_use() -> None:
    text = "x" * 20_000
    do = {
        "kind": "tool",
        "tool": "look",
        "arguments": {"text": "${nodes.first.output.text}", "all": "${nodes.all.output}"},
    }
    nodes = {
        "first": {"kind": "tool", "tool": "work"},
        "all": {"kind": "parallel", "branches": {"a": {"kind": "tool", "tool": "look", "arguments": {"n": 1}}}},
        "each": {"kind": "map", "items": list(range(60)), "do": do, "concurrency": 50},
    }
    world = world_of(work={"text": text}, look="seen")
    assert (await finished(world, nodes)).state is RunState.COMPLETED
    given = [json.loads(call.arguments_json) for call in world.registry.checked if call.tool_name == "look"][1:]
    assert given == [{"text": text, "all": {"a": "seen"}}] * 60
    chunks = [run.workflow.chunk for run in runs(world) if run.workflow is not None and run.workflow.chunk is not None]
    assert [text.encode() not in each.scope_state and len(each.scope_state) < 500 for each in chunks] == [True, True]


@pytest.mark.parametrize(
    ("tolerate", "state"), [(0, "FAILED"), (2, "FAILED"), (3, "SUCCEEDED"), ("5%", "SUCCEEDED"), ("4%", "FAILED")]
)
async def test_map_tolerates_failures_up_to_a_limit(tolerate: Any, state: str) -> None:
    nodes = {
        "each": {
            "kind": "map",
            "items": "${input.items}",
            "do": {"kind": "tool", "tool": "work", "arguments": {"n": "${item.n}"}},
            "tolerate": tolerate,
            "concurrency": 50,
            "on_error": "continue",
        },
        "answer": {"kind": "output", "value": {"out": "${nodes.each.output}", "error": "${nodes.each.error}"}},
    }
    items = [{} if n in {3, 10, 55} else {"n": n} for n in range(60)]
    found = json.loads((await finished(world_of(work=1), nodes, {"items": items})).output_json)
    if state == "SUCCEEDED":
        assert found["out"] == [None if n in {3, 10, 55} else 1 for n in range(60)]
    else:
        assert found["error"]["reason"] == "EXPRESSION_FAILED"


@pytest.mark.parametrize(("items", "reason"), [("text", "MAP_NOT_A_LIST"), (None, "MAP_NOT_A_LIST")])
async def test_map_over_a_value_other_than_a_list_fails(items: Any, reason: str) -> None:
    nodes = {
        "each": {
            "kind": "map",
            "items": "${input.items}",
            "do": {"kind": "tool", "tool": "work"},
            "on_error": "continue",
        },
        "answer": {"kind": "output", "value": "${nodes.each.error.reason}"},
    }
    assert (await finished(world_of(), nodes, {"items": items})).output_text == reason


@pytest.mark.parametrize(("effect", "outputs"), [("AT_MOST_ONCE", ["done"] * 3), ("READ_ONLY", [None, None, "done"])])
async def test_map_survives_an_outage_of_the_registry_without_an_operator(effect: str, outputs: list[Any]) -> None:
    """A call with effects waits for the registry, whose journal knows its outcome. Other calls count as failed."""
    world = world_of(work="done")
    world.registry.verdicts["work"] = tool(effect=effect, timeout_seconds=5.0)
    do = {"kind": "tool", "tool": "work"}
    nodes = {
        "all": {"kind": "map", "items": "${[1, 2, 3]}", "concurrency": 2, "tolerate": 2, "do": do},
        "answer": {"kind": "output", "value": "${nodes.all.output}"},
    }
    key = start(world, nodes)
    end, perform = world.clock.monotonic() + 50.0, world.registry.execute

    async def execute(context: CallContext, execution: Execution) -> AsyncGenerator[ExecutionPiece, None]:
        if world.clock.monotonic() < end:
            raise DependencyUnavailable
        async for piece in perform(context, execution):
            yield piece

    world.registry.execute = execute  # type: ignore[method-assign]
    async with asyncio.timeout(300.0), at_work(world.worker(limits=WorkerLimits(runs_max=16))):
        await end_of(world, key)
    assert json.loads(world.ledger.run(key).output_json) == outputs
    assert set(world.registry.effects.values()) == {1}


@pytest.mark.parametrize(("effect", "attempts"), [("IDEMPOTENT", 2), ("AT_MOST_ONCE", 1)])
async def test_only_repeatable_calls_are_retried_after_an_unknown_outcome(effect: str, attempts: int) -> None:
    world = world_of()
    world.registry.verdicts["work"] = tool(effect=effect)
    world.registry.forgets.add("work")
    key = start(world, {"a": {"kind": "tool", "tool": "work", "retry": {"attempts": 2}}})
    async with at_work(world.worker()):
        await world.clock.sleep(100.0)
    expected = RunState.FAILED if attempts == 2 else RunState.NEEDS_ATTENTION
    assert (len(world.ledger.calls(key)), world.ledger.run(key).state) == (attempts, expected)


async def test_workflow_node_runs_another_workflow() -> None:
    world = world_of(look=4)
    inner = {
        "look": {"kind": "tool", "tool": "look", "arguments": {"n": "${input.n}"}},
        "answer": {"kind": "output", "value": {"found": "${nodes.look.output}"}},
    }
    world.workflows.save("inner", inner)
    nodes = {
        "sub": {"kind": "workflow", "workflow": "inner", "input": {"n": "${input.n}"}},
        "gone": {"kind": "workflow", "workflow": "absent", "on_error": "continue"},
        "answer": {"kind": "output", "value": ["${nodes.sub.output.found}", "${nodes.gone.error.reason}"]},
    }
    assert json.loads((await finished(world, nodes, {"n": 2})).output_json) == [4, "WORKFLOW_NOT_FOUND"]
    assert json.loads(world.registry.checked[0].arguments_json) == {"n": 2}


@pytest.mark.parametrize("name", ["run_workflow", "run_items", "undo_run"])
async def test_workflow_with_any_name_is_started_by_its_tool(name: str) -> None:
    world = World({**VERDICTS, name: tool("DELEGATE", context="AGENT", effect="IDEMPOTENT")}, [])
    world.workflows.save(name, {"answer": {"kind": "output", "value": "${input.n}"}})
    nodes = {
        "sub": {"kind": "tool", "tool": name, "arguments": {"n": 3}},
        "answer": {"kind": "output", "value": "${nodes.sub.output}"},
    }
    assert json.loads((await finished(world, nodes)).output_json) == 3


async def test_a_wait_for_a_time_in_the_past_ends_when_it_starts() -> None:
    world = world_of()
    key = start(world, {"past": {"kind": "wait", "until": "${-5000000000}"}})
    await world.finish(key)
    cursor: Any = loop_state.read(world.ledger.tables.loop_states[key]).cursor
    assert cursor.nodes[0].end_ms == cursor.nodes[0].start_ms


async def test_workflows_that_start_each_other_reach_the_depth_limit() -> None:
    world = world_of()
    world.workflows.save("other", {"again": {"kind": "workflow", "workflow": "flow"}})
    run = await finished(world, {"again": {"kind": "workflow", "workflow": "other"}})
    assert (present(run.failure).reason, len(runs(world))) == ("NOT_ALLOWED", 3)


async def test_node_timeout_stops_the_call_and_the_node_may_be_retried() -> None:
    node = {"kind": "tool", "tool": "slow", "timeout_seconds": 5, "retry": {"attempts": 2, "delay_seconds": 0}}
    nodes = {
        "slow": {**node, "on_error": "continue"},
        "answer": {"kind": "output", "value": "${nodes.slow.error.reason}"},
    }
    world = World({**VERDICTS, "slow": tool(effect=EffectClass.READ_ONLY)}, [], seconds=1000.0)
    key = start(world, nodes)
    assert ((await worked(world, key)).output_text, len(world.ledger.calls(key))) == ("NODE_TIMEOUT", 2)


async def test_workflow_fails_at_its_own_timeout() -> None:
    run = await finished(world_of(), {"a": {"kind": "human", "question": "Well?"}}, timeout_seconds=60)
    assert present(run.failure).reason == "RUN_TIMEOUT"


@pytest.mark.parametrize(
    ("form", "who", "asked", "waits"),
    [
        ("question", "user", USER, WaitKind.ANSWER),
        ("approval", "user", USER, WaitKind.APPROVAL),
        ("question", {"user": "kim"}, "kim", WaitKind.PERSON),
        ("approval", {"user": "kim"}, "kim", WaitKind.PERSON),
        ("approval", "approvers", "", WaitKind.PERSON),
    ],
)
async def test_a_human_node_asks_only_the_people_whom_it_names(
    form: str, who: Any, asked: str, waits: WaitKind
) -> None:
    world = world_of()
    key = start(world, {"a": {"kind": "human", "form": form, "who": who, "question": "Well?"}})
    async with at_work(world.worker()):
        while world.ledger.run(key).state is not RunState.WAITING:
            await world.clock.sleep(0.1)
    (call,) = world.ledger.calls(key)
    assert (call.asked_user_id, world.ledger.run(key).waits) == (asked, (waits,))


@pytest.mark.parametrize(
    ("who", "required", "reason"),
    [
        ("user", 2, "TOO_FEW_APPROVERS"),
        ({"user": "kim"}, 2, "TOO_FEW_APPROVERS"),
        ("approvers", 2, ""),
        ("user", 1, ""),
    ],
)
async def test_a_single_person_cannot_approve_if_the_run_requires_more_approvals(
    who: Any, required: int, reason: str
) -> None:
    world = world_of()
    nodes = {"a": {"kind": "human", "form": "approval", "who": who, "question": "Pay?", "retry": {"attempts": 3}}}
    key = start(world, nodes, options=RunOptions(approvals_required=required))
    async with at_work(world.worker()):
        while world.ledger.run(key).state not in {RunState.WAITING, RunState.FAILED}:
            await world.clock.sleep(0.1)
    failure = world.ledger.run(key).failure
    assert (failure.reason if failure else "") == reason
    needed = [present(call.approval).approvals_required for call in world.ledger.calls(key)]
    assert needed == ([] if reason else [required])


async def test_node_repeats_until_its_condition_is_met() -> None:
    def node(most: int) -> dict[str, Any]:
        until = "${output.n == 1 && iteration == 3}"
        return {"kind": "tool", "tool": "work", "repeat": {"until": until, "max": most}, "on_error": "continue"}

    nodes = {
        "met": node(5),
        "unmet": node(2),
        "answer": {"kind": "output", "value": ["${nodes.met.output.n}", "${nodes.unmet.error.reason}"]},
    }
    world = world_of(work={"n": 1})
    assert json.loads((await finished(world, nodes)).output_json) == [1, "REPEAT_LIMIT"]
    assert sum(world.registry.effects.values()) == 5


async def test_run_reports_its_end_to_a_conversation() -> None:
    world = world_of(says("Hello."), says("It found 4."), look=4)
    chat = world.ledger.submit("hello")
    await world.finish(chat)
    conversation_id = world.ledger.run(chat).conversation_id
    nodes = {"look": {"kind": "tool", "tool": "look"}, "answer": {"kind": "output", "value": "${nodes.look.output}"}}
    version = world.workflows.save("flow", nodes)
    pinned = PinnedWorkflow(name="flow", version=version, reports_to_conversation_id=conversation_id)
    key = world.ledger.submit("[Workflow flow]", workflow=pinned)
    async with at_work(world.worker()):
        await end_of(world, key)
        while len(runs(world)) < 3 or any(run.state not in ENDED for run in runs(world)):
            await world.clock.sleep(0.1)
    assert world.ledger.run(key).conversation_id != conversation_id
    assert world.ledger.messages(chat)[-1].text == "It found 4."
    (notice,) = [message for message in world.ledger.messages(chat) if message.role is Role.NOTICE]
    (content,) = json.loads(notice.notices_json)
    assert content == {"job_id": key.run_id, "tool": "flow", "state": "COMPLETED", "result": 4}


async def test_message_does_not_steer_a_workflow_run() -> None:
    world = world_of(says("Hello."))
    nodes = {
        "ask": {"kind": "human", "question": "Well?"},
        "answer": {"kind": "output", "value": "${nodes.ask.output}"},
    }
    key = start(world, nodes)
    await world.drive()
    asked = ledger_pb2.SubmitMessageRequest(
        store_id=STORE,
        user_id=USER,
        conversation_id=world.ledger.run(key).conversation_id,
        text="hurry",
        options=wire.OPTIONS.fields(RunOptions()),
        policy=ledger_pb2.MESSAGE_POLICY_STEER,
    )
    assert world.ledger.apply(asked).steered is False
    await world.respond(key)
    assert (await worked(world, key)).output_text == "blue"
