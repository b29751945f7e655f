"""Runs of workflows, on the real drive and ledger."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace as replace_fields
from itertools import count, pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.loop.rules import planning
from pawl.agent_loop.loop.rules.call import CallResult, Inverse
from pawl.agent_loop.loop.rules.decision import ReadProgram
from pawl.agent_loop.loop.rules.fact import Cancel, Decide, Event, Pause, ProgramRead
from pawl.agent_loop.loop.rules.run import PinnedWorkflow, Run, RunOptions, Undo
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.workflows import graph, parsing
from pawl.agent_loop.workflows.executions import Executions
from pawl.agent_loop.workflows.reading import Graphs
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import ConversationId, RunId, RunKey, StoreId, UserId
from pawl.values import ENDED, CallState, CommandOutcome, DecisionKind, EffectClass, RunState, StopCause
from tests.fakes.loop_world import USER, World
from tests.fakes.model import Script, calls, says
from tests.fakes.registry import tool
from tests.unit.agent_loop.scenario import at_work, end_of, present, worked

ERROR = CallResult(content_json=b'{"error":"broken"}', is_error=True, error_reason="TOOL_ERROR")
VERDICTS = {
    "work": tool(),
    "look": tool(effect=EffectClass.READ_ONLY),
    "fails": tool(),
    "gated": replace(tool("APPROVE"), digest="ab" * 32),
}


def start(
    world: World, nodes: dict[str, Any], given: Any = None, options: RunOptions | None = None, **more: Any
) -> RunKey:
    version = world.workflows.save("flow", nodes, **more)
    pinned = PinnedWorkflow(name="flow", version=version, input_json=json.dumps(given or {}).encode())
    return world.ledger.submit("[Workflow flow]", workflow=pinned, options=options)


def world_of(*scripts: Script, **results: Any) -> World:
    world = World(VERDICTS, list(scripts))
    for name, value in results.items():
        world.registry.results[name] = CallResult(content_json=json.dumps(value).encode())
    return world


async def finished(nodes: dict[str, Any], given: Any = None, world: World | None = None, **more: Any) -> Run:
    world = world or world_of()
    key = start(world, nodes, given, **more)
    await world.finish(key)
    return world.ledger.run(key)


async def test_outputs_flow_from_node_to_node() -> None:
    nodes = {
        "first": {"kind": "tool", "tool": "look", "arguments": {"n": "${input.n}"}},
        "second": {"kind": "tool", "tool": "work", "arguments": {"n": "${nodes.first.output.x}"}},
        "answer": {"kind": "output", "value": {"x": "${nodes.first.output.x}", "y": "${nodes.second.output}"}},
    }
    world = world_of(look={"x": 7}, work="done")
    run = await finished(nodes, {"n": 1}, world)
    assert (run.state, json.loads(run.output_json)) == (RunState.COMPLETED, {"x": 7, "y": "done"})
    assert [json.loads(call.arguments_json) for call in world.registry.checked] == [{"n": 1}, {"n": 7}]


async def test_failed_node_is_tried_again_after_growing_delays() -> None:
    nodes = {"a": {"kind": "tool", "tool": "fails", "retry": {"attempts": 3, "delay_seconds": 10, "factor": 3}}}
    world = world_of()
    world.registry.results["fails"] = ERROR
    key = start(world, nodes)
    await world.finish(key)
    run, made = world.ledger.run(key), world.ledger.calls(key)
    failure = present(run.failure)
    assert (run.state, failure.reason, failure.message) == (RunState.FAILED, "TOOL_ERROR", "Node a: broken")
    times = [present(call.create_time) for call in made]
    assert [round(after - before) for before, after in pairwise(times)] == [11, 31]


async def test_waiting_for_a_time_needs_no_worker() -> None:
    nodes = {
        "pause": {"kind": "wait", "seconds": 3600},
        "work": {"kind": "tool", "tool": "look", "after": ["pause"]},
    }
    world = world_of(look=1)
    key = start(world, nodes)
    await world.drive()
    assert (world.ledger.run(key).state, world.ledger.row(key).worker_id) == (RunState.WAITING, None)
    started = world.clock.monotonic()
    await world.finish(key)
    assert 3600 <= world.clock.monotonic() - started < 3610
    assert world.ledger.run(key).state is RunState.COMPLETED


async def test_agent_node_returns_the_answer_of_its_run() -> None:
    nodes = {
        "write": {"kind": "agent", "task": "Shorten: ${input.text}", "instructions": "Be brief.", "tools": ["look"]},
        "answer": {"kind": "output", "value": "${nodes.write.output}!"},
    }
    world = world_of(says("short"))
    assert (await finished(nodes, {"text": "long"}, world)).output_text == "short!"
    request = world.model.requests[0]
    assert [part for part in ("Shorten: long", "Be brief.") if part not in str(request.messages)] == []
    assert [each["function"]["name"] for each in request.tools] == ["look"]


async def test_agent_node_with_a_schema_returns_json() -> None:
    nodes = {
        "sort": {"kind": "agent", "task": "Sort it.", "output_schema": {"type": "object", "minProperties": 1}},
        "answer": {"kind": "output", "value": "${nodes.sort.output.urgent}"},
    }
    run = await finished(nodes, world=world_of(says("no JSON"), says('{"urgent":true}')))
    assert json.loads(run.output_json) is True


async def test_missing_agent_fails_its_node() -> None:
    nodes = {"a": {"kind": "agent", "agent": "absent", "task": "x", "on_error": "continue"}}
    nodes["answer"] = {"kind": "output", "value": "${nodes.a.error.reason}"}
    assert (await finished(nodes)).output_text == "NOT_ALLOWED"


@pytest.mark.parametrize("jobs", ["wait", "leave"])
async def test_an_agent_node_waits_for_the_jobs_below_it_unless_they_are_left_running(jobs: str) -> None:
    nodes = {
        "a": {"kind": "agent", "task": "x", "jobs": jobs},
        "answer": {"kind": "output", "value": "${nodes.a.output}"},
    }
    background = 'work {"_executeAsync":true,"n":1}'
    world = world_of(calls(background), says("Started."), says("It is done."), says("Noted."), work="made")
    world.model.by_round = False
    world.registry.seconds = 60.0
    run = await worked(world, start(world, nodes))
    assert (run.state, run.output_text) == (RunState.COMPLETED, "It is done." if jobs == "wait" else "Started.")
    assert (sum(world.registry.effects.values()) == 1) >= (jobs == "wait")


async def test_human_node_asks_the_user_and_takes_the_answer() -> None:
    nodes = {
        "ask": {"kind": "human", "question": "Which colour for ${input.what}?", "options": ["blue", "red"]},
        "answer": {"kind": "output", "value": "${nodes.ask.output}"},
    }
    world = world_of()
    key = start(world, nodes, {"what": "the door"})
    await world.drive()
    (call,) = world.ledger.calls(key)
    assert present(call.question).question == "Which colour for the door?"
    await world.respond(key)
    await world.finish(key)
    assert world.ledger.run(key).output_text == "blue"


async def test_human_node_gets_its_default_at_the_deadline() -> None:
    nodes = {
        "ask": {"kind": "human", "question": "Ok?", "deadline_seconds": 60, "default": {"n": "${input.n}"}},
        "late": {"kind": "human", "question": "Ok?", "deadline_seconds": 60, "on_error": "continue"},
        "answer": {"kind": "output", "value": {"ask": "${nodes.ask.output}", "late": "${nodes.late.error.reason}"}},
    }
    world = world_of()
    key = start(world, nodes, {"n": 3})
    while world.ledger.run(key).state not in ENDED:
        await world.drive()
    assert json.loads(world.ledger.run(key).output_json) == {"ask": {"n": 3}, "late": "EXPIRED"}


@pytest.mark.parametrize("kind", [DecisionKind.APPROVE, DecisionKind.REJECT, DecisionKind.ANSWER])
async def test_human_approval_is_decided_like_a_gated_call(kind: DecisionKind) -> None:
    nodes = {
        "check": {"kind": "human", "form": "approval", "who": "approvers", "question": "Send?", "on_error": "continue"},
        "answer": {"kind": "output", "value": {"out": "${nodes.check.output}", "error": "${nodes.check.error}"}},
    }
    world = world_of()
    key = start(world, nodes)
    await world.drive()
    (call,) = world.ledger.calls(key)
    assert present(call.approval).preview == "Send?"
    answer = "later" if kind is DecisionKind.ANSWER else ""
    outcome = await world.ledger.send(key, Decide(call_id=call.call_id, kind=kind, answer=answer), approver="boss")
    assert outcome is CommandOutcome.ACCEPTED
    await world.finish(key)
    user = Principal(store_id=key.store_id, user_id=UserId(USER))
    executions = Executions(PublicLedger(world.ledger.channel), Graphs(world.workflows))
    assert (await executions.get(user, key.run_id, "check")).nodes[0].decided_by == "boss"
    found = json.loads(world.ledger.run(key).output_json)
    assert found["out"] == (True if kind is DecisionKind.APPROVE else None)
    assert (found["error"] or {}).get("reason") == (None if kind is DecisionKind.APPROVE else "REJECTED")


async def test_output_that_is_not_strict_json_is_a_typed_error() -> None:
    nodes = {
        "a": {"kind": "output", "value": "${input.text}", "on_error": {"go_to": "caught"}},
        "caught": {"kind": "tool", "tool": "work", "arguments": {"why": "${nodes.a.error.reason}"}},
    }
    world = world_of()
    assert (await finished(nodes, {"text": "a\0b"}, world)).state is RunState.COMPLETED
    assert json.loads(world.registry.checked[0].arguments_json) == {"why": "EXPRESSION_FAILED"}


@pytest.mark.parametrize("in_map", [False, True])
async def test_default_that_cannot_be_evaluated_fails_the_node(in_map: bool) -> None:
    ask: dict[str, Any] = {"kind": "human", "question": "Well?", "deadline_seconds": 1, "default": "${input.absent}"}
    nodes = {
        "a": {"kind": "map", "items": [1], "do": ask} if in_map else ask,
        "answer": {"kind": "output", "value": "${nodes.a.error.reason}"},
    }
    nodes["a"]["on_error"] = "continue"
    world = world_of()
    run = await worked(world, start(world, nodes))
    assert run.output_text == "EXPRESSION_FAILED"


@pytest.mark.parametrize("kind", [Event(name="paid"), Pause()])
async def test_tools_are_pinned_even_if_a_command_arrives_before_the_first_claim(kind: Any) -> None:
    world = world_of(look=1)
    key = start(world, {"a": {"kind": "tool", "tool": "look"}})
    await world.ledger.send(key, kind)
    await world.drive()
    if isinstance(kind, Pause):
        await world.ledger.send(key, Pause(resumes=True))
        await world.drive()
    assert world.ledger.run(key).state is RunState.COMPLETED


async def test_agent_that_a_user_cancels_is_not_started_again() -> None:
    nodes = {"a": {"kind": "agent", "task": "x", "retry": {"attempts": 3, "delay_seconds": 0}}}
    world = world_of(calls('work {"n":1}'), says("Done."))
    world.registry.seconds = 100.0
    key = start(world, nodes)
    async with at_work(world.worker()):
        while len(world.ledger.tables.runs) < 2:
            await world.clock.sleep(0.1)
        (child,) = [each for each in world.ledger.tables.runs if each != key]
        await world.clock.sleep(5.0)
        await world.ledger.send(child, Cancel(cause=StopCause.USER))
        await end_of(world, key)
    assert (present(world.ledger.run(key).failure).reason, len(world.ledger.tables.runs)) == ("AGENT_CANCELLED", 2)


async def test_tools_are_refused_once_the_key_of_the_run_is_revoked() -> None:
    world = world_of(look=1)
    world.dependencies = replace_fields(world.dependencies, credential_is_gone=lambda _: True)
    run = await finished({"a": {"kind": "tool", "tool": "look", "retry": {"attempts": 3}}}, world=world)
    assert present(run.failure).reason == "PERMISSION_DENIED"


@pytest.mark.parametrize("calls_allowed", [0, 1])
async def test_agents_below_make_no_calls_once_the_key_is_revoked(calls_allowed: int) -> None:
    world, checks = world_of(calls("look"), says("It was refused."), look=1), count()
    world.dependencies = replace_fields(world.dependencies, credential_is_gone=lambda _: next(checks) >= calls_allowed)
    run = await finished({"a": {"kind": "agent", "task": "Look.", "retry": {"attempts": 3}}}, world=world)
    assert (present(run.failure).reason, len(world.model.requests)) == ("PERMISSION_DENIED", calls_allowed)
    assert not world.registry.effects


def test_calls_do_not_continue_after_a_takeover_until_the_definition_is_read() -> None:
    """Otherwise an agent would start without the restrictions of its node."""
    nodes = {"a": {"kind": "agent", "agent": "writer", "task": "x", "tools": []}}
    found = graph.of_definition(parsing.read({"name": "flow", "nodes": nodes}))
    run = Run(
        store_id=StoreId("s"),
        user_id=UserId("u"),
        conversation_id=ConversationId("c"),
        run_id=RunId("r"),
        workflow=PinnedWorkflow(name="flow", version=1),
    )
    first = planning.plan(State(run=run), [ProgramRead(graph=found, tools=())], 1000.0)
    assert [call.state for call in first.state.open_calls] == [CallState.RUNNABLE]
    second = planning.plan(State(run=first.state.run, calls=first.state.calls, loop=first.state.loop), [], 1001.0)
    assert [type(work) for work in second.work] == [ReadProgram]


async def test_a_map_whose_outputs_exceed_the_limit_fails_with_a_typed_error() -> None:
    nodes = {
        "each": {"kind": "map", "items": list(range(40)), "do": {"kind": "tool", "tool": "look"}, "concurrency": 50},
    }
    world = world_of(look="x" * 30_000)
    run = await worked(world, start(world, nodes))
    assert present(run.failure).reason == "OUTPUT_TOO_LARGE"


# Undo of workflow runs: on request, and when a node fails with on_error undo.


WITH_INVERSES = {
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
    world = World(dict(WITH_INVERSES), [calls('write {"n":4}'), says("Written.")])
    inverse = Inverse(tool_name="unwrite", arguments_json=b'{"n":0}', summary="Take it back")
    world.registry.results = {
        "write": CallResult(content_json=b'"done"', inverse=inverse),
        "fails": CallResult(content_json=b'{"error":"broken"}', is_error=True, error_reason="TOOL_ERROR"),
    }
    return world


def undone(world: World) -> list[int]:
    """Return what the calls that were undone had written, in the order in which they were undone."""
    made = {call.call_id: call for key in world.ledger.tables.runs for call in world.ledger.calls(key)}
    inverses = [call for call in made.values() if call.undoes_call_id and call.state is CallState.SUCCEEDED]
    inverses.sort(key=lambda call: call.end_time or 0.0)
    return [json.loads(made[call.undoes_call_id].arguments_json)["n"] for call in inverses]


async def undo_of(world: World, key: RunKey) -> Run:
    """Have a worker undo a run, and return the run that did so."""
    asked = Undo(run_id=key.run_id, user_id=UserId(USER))
    conversation_id = world.ledger.run(key).conversation_id
    return await worked(world, world.ledger.submit("undo", conversation_id=conversation_id, undo=asked))


# One write, and a node whose failure undoes it.
FAILING_SOON = {"first": NODES["first"], "last": {**FAILING["last"], "after": ["first"]}}


async def test_undoing_a_run_undoes_the_runs_below_it_in_reverse_order() -> None:
    world = new_world()
    key = start(world, NODES)
    assert (await worked(world, key)).state is RunState.COMPLETED
    undoing = await undo_of(world, key)
    assert undone(world) in ([4, 3, 2, 1], [4, 2, 3, 1])
    assert "undid 4 of 4 calls with effects" in undoing.output_text


async def test_failed_node_with_on_error_undo_undoes_all_effects_before_the_run_fails() -> None:
    world = new_world()
    key = start(world, FAILING)
    run = await worked(world, key)
    assert (run.state, present(run.failure).message) == (RunState.FAILED, "Node last: broken")
    assert undone(world) in ([4, 3, 2, 1], [4, 2, 3, 1])
    assert all(call.settled for call in world.ledger.calls(key))


async def test_an_undo_that_cannot_revert_a_call_fails_and_so_does_the_run() -> None:
    world = new_world()
    world.registry.results["unwrite"] = CallResult(
        content_json=b'{"error":"It was changed."}', is_error=True, error_reason="TOOL_ERROR"
    )
    run = await worked(world, start(world, FAILING_SOON))
    (undoing,) = (world.ledger.run(each) for each in world.ledger.tables.runs if world.ledger.run(each).undo)
    failure = present(undoing.failure)
    assert (undoing.state, failure.reason) == (RunState.FAILED, "UNDO_INCOMPLETE")
    assert failure.message == "1 of 1 calls could not be undone: write: It was changed."
    assert "undid 0 of 1 calls with effects" in undoing.output_text
    incomplete = f"Not everything was undone: run {undoing.run_id} ended with UNDO_INCOMPLETE."
    assert incomplete in present(run.failure).message


class Crash(BaseException):
    """The process is killed."""


@pytest.mark.parametrize("position", range(0, 60, 3))
async def test_an_undo_continues_after_a_crash_without_undoing_anything_twice(position: int) -> None:
    world, count = new_world(), 0
    key = start(world, FAILING_SOON)

    async def crash(request: str, carried_out: bool) -> None:
        nonlocal count
        count += request != "ClaimRuns"
        if request != "ClaimRuns" and count - 1 == position:
            raise Crash

    world.ledger.fault = crash
    while world.ledger.run(key).state not in ENDED:
        with suppress(Crash):
            await world.drive()
    assert (world.ledger.run(key).state, undone(world)) == (RunState.FAILED, [1])


async def test_undo_child_is_not_itself_undone() -> None:
    world = new_world()
    key = start(world, FAILING_SOON)
    await worked(world, key)
    undoing = await undo_of(world, key)
    assert (undone(world), "was already undone" in undoing.output_text) == ([1], True)


async def test_running_calls_end_before_the_effects_are_undone() -> None:
    nodes: dict[str, Any] = {
        "fails": {"kind": "tool", "tool": "write", "arguments": {"n": "${input.missing}"}, "on_error": "undo"},
        "beside": {"kind": "tool", "tool": "write", "arguments": {"n": 5}},
        "pause": {"kind": "wait", "seconds": 5},
    }
    nodes["fails"]["after"] = ["pause"]
    world = World(dict(WITH_INVERSES), [], seconds=30.0)
    world.registry.results = new_world().registry.results
    run = await worked(world, start(world, nodes))
    assert (present(run.failure).reason, undone(world)) == ("EXPRESSION_FAILED", [5])
    assert sum(world.registry.effects.values()) == 2
