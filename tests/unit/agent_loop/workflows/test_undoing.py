"""Undo of workflow runs: on request, and when a node fails with on_error undo."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

from pawl.agent_loop.loop.rules.call import CallResult, Inverse
from pawl.agent_loop.loop.rules.run import PinnedWorkflow, Undo
from pawl.chassis.ids import RunKey, UserId
from pawl.values import ENDED, CallState, RunState
from tests.fakes.loop_world import USER, World
from tests.fakes.model import calls, says
from tests.fakes.registry import tool
from tests.unit.agent_loop.scenario import at_work, end_of, present

VERDICTS = {
    "write": tool(),
    "unwrite": tool(),
    "gated": replace(tool("APPROVE"), digest="ab" * 32),
    "fails": tool(),
    "look": tool(effect="READ_ONLY"),
}
NODES: dict[str, Any] = {
    "first": {"kind": "tool", "tool": "write", "arguments": {"n": 1}},
    "each": {
        "kind": "map",
        "items": [2, 3],
        "do": {"kind": "tool", "tool": "write", "arguments": {"n": "${item}"}},
        "after": ["first"],
    },
    "agent": {"kind": "agent", "task": "Write.", "after": ["each"]},
    "look": {"kind": "tool", "tool": "look", "after": ["agent"]},
}
FAILING = {
    **NODES,
    "last": {"kind": "tool", "tool": "fails", "after": ["look"], "on_error": "undo"},
    "other": {"kind": "human", "question": "Well?"},
}


def new_world() -> World:
    world = World(dict(VERDICTS), [calls('write {"n":4}'), says("Written.")])
    inverse = Inverse(tool_name="unwrite", arguments_json=b'{"n":0}', summary="Take it back")
    world.registry.results = {
        "write": CallResult(content_json=b'"done"', inverse=inverse),
        "fails": CallResult(content_json=b'{"error":"broken"}', is_error=True, error_reason="TOOL_ERROR"),
    }
    return world


def start(world: World, nodes: dict[str, Any]) -> RunKey:
    version = world.workflows.save("flow", nodes)
    pinned = PinnedWorkflow(name="flow", version=version)
    return world.ledger.submit("[Workflow flow]", workflow=pinned)


def undone(world: World) -> list[int]:
    """Return what the calls that were undone had written, in the order in which they were undone."""
    made = {call.call_id: call for key in world.ledger.tables.runs for call in world.ledger.calls(key)}
    inverses = [call for call in made.values() if call.undoes_call_id and call.state is CallState.SUCCEEDED]
    inverses.sort(key=lambda call: call.end_time or 0.0)
    return [json.loads(made[call.undoes_call_id].arguments_json)["n"] for call in inverses]


async def test_undo_of_a_run_undoes_the_runs_below_it_in_reverse_order() -> None:
    world = new_world()
    key = start(world, NODES)
    async with at_work(world.worker()):
        await end_of(world, key)
        asked = Undo(run_id=key.run_id, user_id=UserId(USER))
        conversation_id = world.ledger.run(key).conversation_id
        undoing = world.ledger.submit("undo", conversation_id=conversation_id, undo=asked)
        await end_of(world, undoing)
    assert world.ledger.run(key).state is RunState.COMPLETED
    assert undone(world) in ([4, 3, 2, 1], [4, 2, 3, 1])
    assert "4 of 4 calls with effects were undone" in world.ledger.run(undoing).output_text


async def test_failed_node_with_on_error_undo_undoes_all_effects_before_the_run_fails() -> None:
    world = new_world()
    key = start(world, FAILING)
    async with at_work(world.worker()):
        await end_of(world, key)
    run = world.ledger.run(key)
    assert run.state is RunState.FAILED
    assert present(run.failure).message == "Node last: broken"
    assert undone(world) in ([4, 3, 2, 1], [4, 2, 3, 1])
    assert all(call.settled for call in world.ledger.calls(key))


async def test_undo_that_cannot_revert_a_call_fails_and_the_run_says_so() -> None:
    world = new_world()
    world.registry.results["unwrite"] = CallResult(
        content_json=b'{"error":"It was changed."}', is_error=True, error_reason="TOOL_ERROR"
    )
    key = start(world, {"first": NODES["first"], "last": {**FAILING["last"], "after": ["first"]}})
    async with at_work(world.worker()):
        await end_of(world, key)
    (undoing,) = (world.ledger.run(each) for each in world.ledger.tables.runs if world.ledger.run(each).undo)
    assert undoing.state is RunState.FAILED
    assert present(undoing.failure).reason == "UNDO_INCOMPLETE"
    assert present(undoing.failure).message == "1 of 1 calls could not be undone: write: It was changed."
    assert "0 of 1 calls with effects were undone" in undoing.output_text
    assert f"Not everything was undone: run {undoing.run_id} ended with UNDO_INCOMPLETE." in (
        present(world.ledger.run(key).failure).message
    )


class Crash(BaseException):
    """The process is killed."""


@pytest.mark.parametrize("position", range(0, 60, 3))
async def test_undo_continues_after_a_crash_and_undoes_nothing_twice(position: int) -> None:
    world, count = new_world(), 0
    key = start(world, {"first": NODES["first"], "last": {**FAILING["last"], "after": ["first"]}})

    async def crash(request: str, carried_out: bool) -> None:
        nonlocal count
        count += request != "ClaimRuns"
        if request != "ClaimRuns" and count - 1 == position:
            raise Crash

    world.ledger.fault = crash
    while world.ledger.run(key).state not in ENDED:
        with suppress(Crash):
            await world.drive()
    assert world.ledger.run(key).state is RunState.FAILED
    assert undone(world) == [1]


async def test_undo_child_is_not_itself_undone() -> None:
    world = new_world()
    key = start(world, {"first": NODES["first"], "last": {**FAILING["last"], "after": ["first"]}})
    async with at_work(world.worker()):
        await end_of(world, key)
        asked = Undo(run_id=key.run_id, user_id=UserId(USER))
        conversation_id = world.ledger.run(key).conversation_id
        undoing = world.ledger.submit("undo", conversation_id=conversation_id, undo=asked)
        await end_of(world, undoing)
    assert undone(world) == [1]
    assert "was already undone" in world.ledger.run(undoing).output_text


async def test_running_calls_end_before_the_effects_are_undone() -> None:
    nodes: dict[str, Any] = {
        "fails": {"kind": "tool", "tool": "write", "arguments": {"n": "${input.missing}"}, "on_error": "undo"},
        "beside": {"kind": "tool", "tool": "write", "arguments": {"n": 5}},
        "pause": {"kind": "wait", "seconds": 5},
    }
    nodes["fails"]["after"] = ["pause"]
    world = World(dict(VERDICTS), [], seconds=30.0)
    world.registry.results = new_world().registry.results
    key = start(world, nodes)
    async with at_work(world.worker()):
        await end_of(world, key)
    assert present(world.ledger.run(key).failure).reason == "EXPRESSION_FAILED"
    assert undone(world) == [5]
    assert sum(world.registry.effects.values()) == 2
