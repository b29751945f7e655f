"""How GetExecution describes the nodes of a run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent_loop.loop.rules.run import MapChunk, PinnedWorkflow, Run
from pawl.agent_loop.workflows import cursor as cursors
from pawl.agent_loop.workflows import graph as graphs
from pawl.agent_loop.workflows import parsing
from pawl.agent_loop.workflows.cursor import NodeKey, NodeRecord, NodeState, WorkflowCursor
from pawl.agent_loop.workflows.execution import Execution
from pawl.agent_loop.workflows.graph import Step
from pawl.agent_loop.workflows.values import CallsNeeded
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.event.v1 import call_pb2
from pawl.event.v1 import workflow_pb2 as pb
from pawl.values import CallState, RunState

OWN = RunId("run_1")
LOOK: dict[str, Any] = {"kind": "tool", "tool": "look", "retry": {"attempts": 3}}
NODES: dict[str, Any] = {
    "fetch": LOOK,
    "both": {"kind": "parallel", "branches": {"a": LOOK, "b": LOOK}},
    "each": {"kind": "map", "items": "${nodes.fetch.output.lines}", "do": {"kind": "tool", "tool": "look"}},
    "ask": {"kind": "human", "question": "Right?"},
    "pause": {"kind": "wait", "event": "paid"},
}
GRAPH = graphs.of_definition(parsing.read({"name": "w", "nodes": NODES}))
NUMBERS = {step.path: step.number for step in GRAPH.steps}


def run_of(state: RunState = RunState.QUEUED, chunk: MapChunk | None = None) -> Run:
    return Run(
        store_id=StoreId("acme"),
        user_id=UserId("ann"),
        conversation_id=ConversationId("c"),
        run_id=OWN,
        state=state,
        workflow=PinnedWorkflow(name="w", version=1, chunk=chunk),
    )


def step_at(path: str) -> Step:
    step = GRAPH.step(path)
    assert step is not None
    return step


def execution(records: dict[str, NodeRecord], *calls: call_pb2.Call, state: RunState = RunState.WAITING) -> Execution:
    cursor = WorkflowCursor(start_time=1000.0, nodes={NUMBERS[path]: record for path, record in records.items()})
    found = Execution(run_of(state=state), GRAPH, cursor)
    found.add_calls(calls)
    return found


def call(
    path: str,
    state: CallState,
    content: Any = None,
    *,
    attempt: int = 1,
    chunk: int = 0,
    child: str = "",
    omitted: int = 0,
) -> call_pb2.Call:
    result = call_pb2.CallResult(
        content_json=json.dumps(content).encode(),
        is_error=state is CallState.FAILED,
        error_reason="TOOL_ERROR" if state is CallState.FAILED else "",
    )
    return call_pb2.Call(
        run_id=OWN,
        call_id=cursors.call_id(OWN, NUMBERS[path], NodeKey(1, attempt, chunk)),
        tool_name="look",
        state=state.value,  # type: ignore[arg-type]  # the same numbers
        result=result if state.is_terminal and not omitted else None,
        result_omitted_bytes=omitted,
        child_run_id=child,
        create_time=Timestamp(seconds=1001),
        end_time=Timestamp(seconds=1002) if state.is_terminal else None,
    )


def nodes(found: Execution) -> dict[str, pb.NodeExecution]:
    shown, waiting = {}, [*found.tree()]
    while waiting:
        node = waiting.pop()
        shown[node.path] = node
        waiting += node.nodes
    return shown


def record(state: NodeState, **fields: Any) -> NodeRecord:
    return NodeRecord(state=state, **{"start_ms": 1000, "end_ms": 2500} | fields)


OPEN: dict[str, Any] = {"end_ms": None}


def test_node_shows_its_state_times_and_the_size_of_its_output() -> None:
    found = nodes(execution({"fetch": record(NodeState.SUCCEEDED)}, call("fetch", CallState.SUCCEEDED, {"lines": [1]})))
    fetch = found["fetch"]
    assert (fetch.kind, fetch.state, fetch.order, fetch.attempt) == ("tool", pb.NODE_STATE_SUCCEEDED, 1, 1)
    assert (fetch.input_json, fetch.output_json, fetch.output_omitted_bytes) == (b"", b"", len('{"lines": [1]}'))
    assert (fetch.start_time.seconds, fetch.end_time.ToMilliseconds()) == (1001, 1_002_500)
    assert found["each"].state == pb.NODE_STATE_PENDING
    assert not found["each"].order


def test_branches_are_shown_below_their_parallel_node() -> None:
    records = {
        "both": record(NodeState.SUCCEEDED),
        "both.a": record(NodeState.SUCCEEDED),
        "both.b": record(NodeState.CANCELLED),
    }
    found = execution(records, call("both.a", CallState.SUCCEEDED, "x"))
    both = next(node for node in found.tree() if node.path == "both")
    assert [(node.path, node.state) for node in both.nodes] == [
        ("both.a", pb.NODE_STATE_SUCCEEDED),
        ("both.b", pb.NODE_STATE_CANCELLED),
    ]
    assert found.output(step_at("both")) == b'{"a":"x"}'


def test_nodes_are_ordered_by_their_start_times() -> None:
    records = {
        "pause": record(NodeState.RUNNING, start_ms=5, **OPEN),
        "fetch": record(NodeState.RETRYING, start_ms=9, attempt=2, reason="TOOL_ERROR", **OPEN),
        "ask": record(NodeState.RUNNING, start_ms=7, **OPEN),
    }
    found = execution(
        records, call("ask", CallState.ASKED), call("fetch", CallState.FAILED, {"error": "The server is down."})
    )
    shown = nodes(found)
    assert found.current == ["pause", "ask", "fetch"]
    assert [shown[path].order for path in ("pause", "ask", "fetch")] == [1, 2, 3]
    waiting = {shown[path].state for path in ("pause", "ask", "fetch")}
    assert waiting == {pb.NODE_STATE_WAITING}, "for an event, an answer and the next attempt"
    assert shown["fetch"].error == pb.NodeError(reason="TOOL_ERROR", message="The server is down.")


def test_ended_run_has_no_open_nodes() -> None:
    records = {"fetch": record(NodeState.FAILED, reason="TOOL_ERROR"), "ask": record(NodeState.RUNNING, **OPEN)}
    found = execution(records, call("fetch", CallState.FAILED, {"error": "No."}), state=RunState.FAILED)
    assert (found.failed, found.current) == ("fetch", [])
    assert {nodes(found)[path].state for path in ("ask", "each")} == {pb.NODE_STATE_CANCELLED}


def test_an_omitted_result_is_read_before_the_output() -> None:
    found = execution({"fetch": record(NodeState.SUCCEEDED)}, call("fetch", CallState.SUCCEEDED, omitted=9000))
    assert nodes(found)["fetch"].output_omitted_bytes == 9000
    step = step_at("fetch")
    with pytest.raises(CallsNeeded):
        found.output(step)
    found.add_calls([call("fetch", CallState.SUCCEEDED, "x")])
    assert found.output(step) == b'"x"'


def test_node_shows_the_attempts_of_its_current_iteration() -> None:
    step = step_at("fetch")
    calls = (
        call("fetch", CallState.FAILED, {"error": "Down."}, attempt=1),
        call("fetch", CallState.SUCCEEDED, 1, attempt=2),
    )
    found = execution({"fetch": record(NodeState.SUCCEEDED, attempt=2)}, *calls)
    assert set(found.calls_of(step)) == {each.call_id for each in calls}
    assert [(each.attempt, each.state, each.error.message) for each in found.node(step).attempts] == [
        (1, pb.NODE_STATE_FAILED, "Down."),
        (2, pb.NODE_STATE_SUCCEEDED, ""),
    ]


def test_map_counts_its_items_and_lists_its_chunks() -> None:
    step = step_at("each")
    found = execution(
        {"each": record(NodeState.RUNNING, items=120, chunks=2, open_chunks=(1,), failed_items=2, **OPEN)},
        call("each", CallState.SUCCEEDED, {"outputs": [1] * 40, "failed": 2}, child="run_a"),
        call("each", CallState.DELEGATED, chunk=1, child="run_b"),
    )
    shown = nodes(found)["each"].map
    assert (shown.items, shown.succeeded, shown.failed, shown.running) == (120, 38, 2, 40)
    assert [(each.run_id, each.first_index, each.items, each.state) for each in found.node(step).map.chunks] == [
        ("run_a", 0, 40, pb.NODE_STATE_SUCCEEDED),
        ("run_b", 40, 40, pb.NODE_STATE_RUNNING),
    ]


def test_run_of_a_map_shows_one_node_for_each_item() -> None:
    graph = graphs.of_items(GRAPH, "each", range(50, 52), 1)
    chunk = MapChunk(node="each", first_index=50, items_json=b"[1, 2]")
    found = Execution(run_of(chunk=chunk), graph, WorkflowCursor())
    assert [(node.path, node.item_index, node.kind) for node in found.tree()] == [
        ("each[50]", 50, "tool"),
        ("each[51]", 51, "tool"),
    ]


def test_reused_node_names_the_call_of_the_earlier_run() -> None:
    cursor = WorkflowCursor(
        start_time=1000.0,
        nodes={NUMBERS["fetch"]: NodeRecord(state=NodeState.SUCCEEDED, origin=1, end_ms=0)},
        origins=(RunId("run_old"),),
    )
    found = Execution(run_of(), GRAPH, cursor)
    assert found.calls_of(step_at("fetch")) == [cursors.call_id(RunId("run_old"), NUMBERS["fetch"], NodeKey(1, 1, 0))]
    fetch = nodes(found)["fetch"]
    assert fetch.reused
    assert not fetch.HasField("start_time")
    assert CallId(fetch.call_id) == ""
