"""GetExecution and RerunFrom of runs that the real drive and ledger have played."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.loop.rules.call import CallResult
from pawl.agent_loop.loop.rules.fact import Decide, Event
from pawl.agent_loop.loop.rules.run import PinnedWorkflow, Undo
from pawl.agent_loop.undo import rules as undo
from pawl.agent_loop.undo.planning import sources
from pawl.agent_loop.undo.rules import UndoState
from pawl.agent_loop.workflows.cursor import WorkflowCursor
from pawl.agent_loop.workflows.executions import Executions
from pawl.agent_loop.workflows.reading import Graphs
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, CallKey, RunKey, StoreId, UserId
from pawl.errors import CallNotPending, CompletionNotFound, RunNotEnded
from pawl.event.v1 import workflow_pb2 as pb
from pawl.values import WITH_PEOPLE, DecisionKind, EffectClass, RunState
from tests.fakes.loop_world import STORE, USER, World
from tests.fakes.registry import tool
from tests.unit.agent_loop.scenario import at_work, end_of, present
from tests.unit.agent_loop.workflows.test_running import NODES as UNDOABLE
from tests.unit.agent_loop.workflows.test_running import new_world, start

CALLER = Principal(store_id=StoreId(STORE), user_id=UserId(USER))
ERROR = CallResult(content_json=b'{"error":"broken"}', is_error=True, error_reason="TOOL_ERROR")
NODES: dict[str, Any] = {
    "fetch": {"kind": "tool", "tool": "look"},
    "write": {"kind": "tool", "tool": "work", "arguments": {"n": "${nodes.fetch.output.n}"}},
    "both": {
        "kind": "parallel",
        "branches": {"a": {"kind": "tool", "tool": "work"}, "b": {"kind": "wait", "seconds": 5}},
        "after": ["fetch"],
    },
    "send": {"kind": "tool", "tool": "fails", "after": ["write", "both"], "retry": {"attempts": 2}},
    "answer": {"kind": "output", "value": "${nodes.send.output}"},
}


def world() -> World:
    made = World({"look": tool(effect=EffectClass.READ_ONLY), "work": tool(), "fails": tool()}, [])
    made.registry.results["look"] = CallResult(content_json=b'{"n":7}')
    made.registry.results["work"] = CallResult(content_json=b'"done"')
    made.registry.results["fails"] = ERROR
    return made


async def played(made: World, pinned: PinnedWorkflow | None = None) -> RunKey:
    pinned = pinned or PinnedWorkflow(name="flow", version=made.workflows.save("flow", NODES))
    key = made.ledger.submit("[Workflow flow]", workflow=pinned)
    await made.finish(key)
    return key


def executions(made: World) -> Executions:
    return Executions(PublicLedger(made.ledger.channel), Graphs(made.workflows))


async def nodes_of(made: World, key: RunKey, path: str = "") -> list[pb.NodeExecution]:
    return list((await executions(made).get(CALLER, key.run_id, path)).nodes)


async def test_ended_run_shows_what_each_node_did() -> None:
    made = world()
    key = await played(made)
    found = await executions(made).get(CALLER, key.run_id, "")
    nodes = {node.path: node for node in found.nodes}
    assert (found.failed_node, list(found.current_nodes)) == ("send", [])
    assert [node.path for node in sorted(found.nodes, key=lambda node: node.order) if node.order] == [
        "fetch",
        *sorted(["write", "both"], key=lambda path: nodes[path].order),
        "send",
    ]
    assert not any(node.input_json or node.output_json for node in found.nodes)
    whole = {path: (await nodes_of(made, key, path))[0] for path in nodes}
    assert (json.loads(whole["fetch"].output_json), json.loads(whole["write"].input_json)) == ({"n": 7}, {"n": 7})
    assert {node.path: node.state for node in nodes["both"].nodes} == {
        "both.a": pb.NODE_STATE_SUCCEEDED,
        "both.b": pb.NODE_STATE_SUCCEEDED,
    }
    assert json.loads(whole["both"].output_json) == {"a": "done", "b": None}
    assert nodes["send"].error == pb.NodeError(reason="TOOL_ERROR", message="broken")
    assert (nodes["send"].attempt, nodes["answer"].state) == (2, pb.NODE_STATE_SKIPPED)
    assert [attempt.error.message for attempt in whole["send"].attempts] == ["broken", "broken"]


async def test_an_execution_reads_all_calls_at_once_but_only_the_output_of_a_named_node() -> None:
    made = world()
    made.registry.results["look"] = CallResult(content_json=json.dumps({"n": "x" * 300_000}).encode())
    asked = list[tuple[str, int]]()
    channel: Any = made.ledger.channel
    unary = channel.unary_unary

    def counted(method: str, *arguments: Any, **options: Any) -> Any:
        call = unary(method, *arguments, **options)

        async def ask(request: Any, **more: Any) -> Any:
            response = await call(request, **more)
            asked.append((method.rpartition("/")[2], response.ByteSize()))
            return response

        return ask

    key = await played(made)
    channel.unary_unary = counted
    tree = await nodes_of(made, key)
    assert next(node for node in tree if node.path == "fetch").output_omitted_bytes > 300_000
    names, sizes = zip(*asked, strict=True)
    assert (names, sum(sizes) < 20_000) == (("GetRun", "GetRun", "GetCalls"), True)
    (found,) = await nodes_of(made, key, "fetch")
    assert (len(found.output_json) > 300_000, found.output_omitted_bytes) == (True, 0)


async def test_output_over_the_limit_is_left_out() -> None:
    made = world()
    made.registry.results["look"] = CallResult(content_json=json.dumps({"n": "x" * 600_000}).encode())
    looks = {name: {"kind": "tool", "tool": "look"} for name in "ab"}
    made.workflows.save("both", {"all": {"kind": "parallel", "branches": looks}})
    key = await played(made, PinnedWorkflow(name="both", version=1))
    (found,) = (await executions(made).get(CALLER, key.run_id, "all")).nodes
    assert (found.output_json, found.output_omitted_bytes > 1_200_000) == (b"", True)


async def test_a_rerun_executes_only_what_did_not_succeed() -> None:
    made = world()
    key = await played(made)
    old, rerun = await executions(made).rerun(CALLER, key.run_id, "send")
    assert not await executions(made).effects(CALLER, old, rerun.again), "both attempts reported that they failed"
    made.registry.results["fails"] = CallResult(content_json=b'"sent"')
    executed = len(made.registry.checked)
    again = await played(
        made,
        replace(
            PinnedWorkflow(name="flow", version=1),
            rerun_of_run_id=key.run_id,
            rerun_node="send",
            start_state=msgspec.json.encode(rerun.start),
        ),
    )
    run = made.ledger.run(again)
    assert (run.state, json.loads(run.output_json)) == (RunState.COMPLETED, "sent")
    assert [call.tool_name for call in made.registry.checked[executed:]] == ["fails"]
    assert {node.path for node in await nodes_of(made, again) if node.reused} == {"fetch", "write", "both"}
    (fetch,) = await nodes_of(made, again, "fetch")
    assert json.loads(fetch.output_json) == {"n": 7}, "it is read from the old run"
    read = await sources(made.ledger.channel, CALLER.store_id, CALLER.user_id, again.run_id)
    *_, reused = map(undo.outcome_of, read)
    reason = f"It reuses results of run {key.run_id}: undo that run to undo their effects."
    assert (reused.state, reused.reason) == (UndoState.NOTHING_TO_UNDO, reason)


async def test_effects_of_nodes_that_run_again_are_listed() -> None:
    made = world()
    key = await played(made)
    for node, count in (("write", 1), ("fetch", 2)):  # Reads have no effects.
        old, rerun = await executions(made).rerun(CALLER, key.run_id, node)
        effects = await executions(made).effects(CALLER, old, rerun.again)
        found = [(call.tool_name, call.run_id, call.arguments_json) for call in effects]
        assert found == [("work", key.run_id, b"")] * count


async def test_rerun_fails_once_the_run_that_it_reuses_has_been_deleted() -> None:
    made = world()
    key = await played(made)
    _, rerun = await executions(made).rerun(CALLER, key.run_id, "write")
    for call in made.ledger.calls(key):
        del made.ledger.tables.calls[CallKey(key.store_id, call.call_id)]
    pinned = PinnedWorkflow(name="flow", version=1, rerun_of_run_id=key.run_id, rerun_node="write")
    run = made.ledger.run(await played(made, replace(pinned, start_state=msgspec.json.encode(rerun.start))))
    assert (run.state, present(run.failure).reason) == (RunState.FAILED, "CALL_NOT_FOUND")


async def test_node_that_waits_for_its_next_attempt_shows_the_last_error() -> None:
    made = world()
    key = start(made, {"send": {"kind": "tool", "tool": "fails", "retry": {"attempts": 2, "delay_seconds": 600}}})
    await made.drive()
    (send,) = await nodes_of(made, key)
    assert (send.state, send.attempt, send.error.message) == (pb.NODE_STATE_WAITING, 2, "broken")


async def test_map_counts_the_items_that_have_succeeded_in_its_open_run() -> None:
    made = world()
    nodes = {"each": {"kind": "map", "items": "${[1, 2, 3]}", "do": {"kind": "human", "question": "Is ${item} right?"}}}
    key = start(made, nodes)
    for _ in range(2):
        await made.drive()
    (below,) = (row.key for row in made.ledger.tables.runs.values() if row.parent_run_id == key.run_id)
    answered = Decide(call_id=made.ledger.calls(below)[0].call_id, kind=DecisionKind.ANSWER, answer="yes")
    await made.ledger.send(below, answered)
    await made.drive()
    (each,) = await nodes_of(made, key)
    assert (each.map.items, each.map.succeeded, each.map.running) == (3, 1, 2)


async def test_rerun_has_the_output_of_its_reused_output_node() -> None:
    made = world()
    nodes = {
        "fetch": {"kind": "tool", "tool": "look"},
        "answer": {"kind": "output", "value": "${nodes.fetch.output.n}"},
        "mail": {"kind": "tool", "tool": "fails", "after": ["answer"]},
        "log": {"kind": "tool", "tool": "work", "after": ["answer"]},
    }
    version = made.workflows.save("flow", nodes)
    key = await played(made, PinnedWorkflow(name="flow", version=version))
    found, rerun = await executions(made).rerun(CALLER, key.run_id, "mail")
    assert {step.path for step in found.graph.steps if step.number in rerun.start.nodes} == {"fetch", "log"}
    made.registry.results["fails"] = CallResult(content_json=b"1")
    start = msgspec.json.encode(rerun.start)
    again = await played(made, PinnedWorkflow(name="flow", version=version, start_state=start))
    assert json.loads(made.ledger.run(again).output_json) == 7
    assert [call.tool_name for call in made.ledger.calls(again)] == ["fails"]


TOKENS: dict[str, Any] = {
    "mail": {"kind": "tool", "tool": "work", "arguments": {"link": "${tokens.paid}"}},
    "other": {"kind": "wait", "event": "paid", "timeout_seconds": 60, "on_error": "continue"},
    "paid": {"kind": "wait", "event": "paid"},
    "last": {"kind": "wait", "event": "sent", "after": ["paid"]},
    "answer": {"kind": "output", "value": "${nodes.paid.output.n}", "after": ["last"]},
}


async def token_of(made: World, key: RunKey) -> str:
    """Return the token that the first node of a run got, once the run waits."""
    while made.ledger.run(key).state is not RunState.WAITING:
        await made.clock.sleep(0.1)
    return str(json.loads(made.ledger.calls(key)[0].arguments_json)["link"])


async def test_a_token_ends_only_the_wait_of_its_own_node() -> None:
    made = world()
    key = start(made, TOKENS)
    async with at_work(made.worker()):
        token = await token_of(made, key)
        gateway = Principal(store_id=StoreId(STORE), user_id=UserId("gateway"))
        user, run_id, name = await executions(made).of_token(gateway, token)
        assert (user.user_id, run_id) == (USER, key.run_id)
        last = f"{key.run_id}.last.{token.rpartition('.')[2]}"
        absent = f"run_absent.{token.partition('.')[2]}"
        elsewhere = Principal(store_id=StoreId("globex"), user_id=UserId(USER))
        wrong = (token[:-1], last, absent, token + "0", f"{key.run_id}.nodes.é", "", "x" * 1000)
        for caller, each in ((elsewhere, token), *((gateway, each) for each in wrong)):
            with pytest.raises(CompletionNotFound):
                await executions(made).of_token(caller, each)
        await made.ledger.send(key, Event(name=name, payload_json=b'{"n":5}'))
        await made.clock.sleep(10)
        found = {node.path: node.state for node in await nodes_of(made, key)}
        assert (found["paid"], found["other"]) == (pb.NODE_STATE_SUCCEEDED, pb.NODE_STATE_WAITING)
        await made.ledger.send(key, Event(name="sent", payload_json=b"1"))
        await end_of(made, key)
    assert made.ledger.run(key).output_text == "5"
    assert (await executions(made).of_token(gateway, token))[2] == name, "the ledger reports a repeated event"


@pytest.mark.parametrize("by_event", [False, True])
async def test_the_token_of_a_node_that_has_ended_is_refused(*, by_event: bool) -> None:
    """The node ends without an event, or by a named event."""
    made = world()
    nodes = {name: node for name, node in TOKENS.items() if name != "other"}
    if not by_event:
        late = {"timeout_seconds": 5, "on_error": {"go_to": "last"}}
        nodes |= {"paid": TOKENS["paid"] | late, "last": {"kind": "wait", "event": "sent"}}
    key = start(made, nodes)
    async with at_work(made.worker()):
        token = await token_of(made, key)
        if by_event:
            await made.ledger.send(key, Event(name="paid", payload_json=b'{"n":5}'))
        await made.clock.sleep(10)
        with pytest.raises(CallNotPending):
            await executions(made).of_token(CALLER, token)


async def test_effects_undone_by_another_run_happen_again_in_a_rerun() -> None:
    """Also if a run below made the calls, or a rerun reuses them."""
    made = new_world()
    nodes = {name: {**node, "after": []} for name, node in UNDOABLE.items()}
    pinned = PinnedWorkflow(name="flow", version=made.workflows.save("flow", nodes))

    async def again(key: RunKey) -> tuple[set[str], WorkflowCursor]:
        found, rerun = await executions(made).rerun(CALLER, key.run_id, "look")
        return {found.graph.steps[number].path for number in rerun.again}, rerun.start

    async def undo_run(key: RunKey, call_id: str = "") -> None:
        asked = Undo(run_id=key.run_id, call_id=CallId(call_id), user_id=UserId(USER))
        conversation_id = made.ledger.run(key).conversation_id
        await end_of(made, made.ledger.submit("undo", conversation_id=conversation_id, undo=asked))

    async with at_work(made.worker()):
        first = made.ledger.submit("[Workflow flow]", workflow=pinned)
        await end_of(made, first)
        assert (await again(first))[0] == {"look"}
        (item,) = (call.call_id for call in made.ledger.tables.calls.values() if call.arguments == b'{"n":3}')
        await undo_run(first, item)
        paths, start = await again(first)
        assert paths == {"look", "each"}
        reused = replace(pinned, rerun_of_run_id=first.run_id, start_state=msgspec.json.encode(start))
        second = made.ledger.submit("[Workflow flow]", workflow=reused)
        await end_of(made, second)
        assert (await again(second))[0] == {"look"}
        made.registry.verdicts["unwrite"] = made.registry.verdicts["gated"]
        undoing = asyncio.create_task(undo_run(first))
        while not (waiting := [row for row in made.ledger.tables.calls.values() if row.state in WITH_PEOPLE]):
            await made.clock.sleep(0.1)
        with pytest.raises(RunNotEnded):
            await again(second)
        while not undoing.done():
            await made.respond(RunKey(waiting[0].store_id, waiting[0].run_id))
            await made.clock.sleep(0.1)
        assert (await again(second))[0] == {"look", "first", "agent"}
