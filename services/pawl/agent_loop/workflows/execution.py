"""The current state of a workflow run's nodes (WorkflowService.GetExecution)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.expression import ExpressionError
from pawl.agent_loop.loop.rules.run import PinnedWorkflow, Run
from pawl.agent_loop.workflows import cursor as cursors
from pawl.agent_loop.workflows import graph as graphs
from pawl.agent_loop.workflows.cursor import NodeKey, NodeRecord, NodeState, WorkflowCursor
from pawl.agent_loop.workflows.definition import CallNode, MapNode, WaitNode
from pawl.agent_loop.workflows.graph import Graph, Step
from pawl.agent_loop.workflows.values import Values
from pawl.chassis import strict_json
from pawl.chassis.ids import CallId, RunId
from pawl.chassis.rpc.translate import timestamp
from pawl.event.v1 import call_pb2
from pawl.event.v1 import workflow_pb2 as pb
from pawl.values import ENDED, WITH_PEOPLE, CallState

_STATES: Final = {
    NodeState.RUNNING: pb.NODE_STATE_RUNNING,
    NodeState.RETRYING: pb.NODE_STATE_WAITING,
    NodeState.SUCCEEDED: pb.NODE_STATE_SUCCEEDED,
    NodeState.FAILED: pb.NODE_STATE_FAILED,
    NodeState.SKIPPED: pb.NODE_STATE_SKIPPED,
    NodeState.CANCELLED: pb.NODE_STATE_CANCELLED,
}
_OPEN: Final = frozenset({pb.NODE_STATE_RUNNING, pb.NODE_STATE_WAITING})
_NEVER_RAN: Final = frozenset({NodeState.SKIPPED, NodeState.CANCELLED})


class Execution:
    """Nodes of a workflow run, and the calls that have been read."""

    def __init__(self, run: Run, graph: Graph, cursor: WorkflowCursor) -> None:
        pinned = run.workflow or PinnedWorkflow(name="", version=0)
        self._run, self._graph, self._cursor, self._chunk = run, graph, cursor, pinned.chunk
        self._calls: dict[CallId, Call] = {}
        self._omitted_bytes: dict[CallId, int] = {}
        # The calls whose results have been read.
        self._whole: dict[CallId, Call] = {}
        self._values = Values(run, pinned, graph, cursor).with_calls(self._whole)
        started = [step.number for step in graph.steps if self._has_run(step)]
        started.sort(key=lambda number: (cursor.nodes[number].start_ms, number))
        self._positions = {number: position for position, number in enumerate(started, 1)}

    def add_calls(self, calls: Iterable[call_pb2.Call]) -> None:
        """Add calls. Some of them may lack their results."""
        for message in calls:
            call = self._calls[CallId(message.call_id)] = wire.CALL.read(message)
            self._omitted_bytes[call.call_id] = message.result_omitted_bytes
            if not message.result_omitted_bytes:
                self._whole[call.call_id] = call

    def calls_of(self, step: Step) -> Sequence[CallId]:
        """Return the ids of the calls of a node's current iteration, oldest first. The last call may not exist yet."""
        record = self._cursor.nodes.get(step.number)
        if record is None or record.state is NodeState.SKIPPED:
            return ()
        if record.event:
            return [self._values.call_id(step, record)]
        if isinstance(step.node, MapNode):
            keys = [NodeKey(record.iteration, record.attempt, chunk) for chunk in range(record.chunks)]
        elif isinstance(step.node, CallNode):
            keys = [NodeKey(record.iteration, attempt, 0) for attempt in range(1, record.attempt + 1)]
        else:
            return ()
        run_id = self._cursor.run_id(record, self._run.run_id)
        return [cursors.call_id(run_id, step.number, key) for key in keys]

    @property
    def last_calls(self) -> set[CallId]:
        """Calls that `tree` shows.

        For each node, this is the last call or, if another attempt is about to start, the previous one.
        """
        found = {call_id for step in self._graph.steps for call_id in self.calls_of(step)[-2:]}
        return found.union(*(self._open_chunks(step) for step in self._graph.steps))

    def open_runs(self, path: str) -> list[RunId]:
        """Return the open child runs of a map."""
        step = self._graph.step(path)
        calls = () if step is None else (self._calls.get(call_id) for call_id in self._open_chunks(step))
        return [call.child_run_id for call in calls if call is not None and call.child_run_id]

    def _open_chunks(self, step: Step) -> list[CallId]:
        record, call_ids = self._cursor.nodes.get(step.number), self.calls_of(step)
        return [call_ids[chunk] for chunk in record.open_chunks] if record is not None and call_ids else []

    def tree(self) -> list[pb.NodeExecution]:
        """Return all nodes, without their attempts, inputs or outputs."""
        made: dict[int, pb.NodeExecution] = {}
        for step in reversed(self._graph.steps):
            message = made[step.number] = self._node(step)
            message.nodes.extend(made.pop(number) for number in step.branches)
            if message.state == pb.NODE_STATE_SUCCEEDED:
                message.output_omitted_bytes = self._result_bytes(self._last(step))
        return [made[step.number] for step in self._graph.steps if step.number in made]

    def node(self, step: Step) -> pb.NodeExecution:
        """Return a node with its attempts, but without its input and output."""
        message = self._node(step)
        message.nodes.extend(self._node(self._graph.steps[number]) for number in step.branches)
        calls = [self._calls[call_id] for call_id in self.calls_of(step) if call_id in self._calls]
        if isinstance(step.node, MapNode):
            message.map.chunks.extend(_chunk(call, number, message.map.items) for number, call in enumerate(calls))
        else:
            attempts = enumerate(calls, 1)
            message.attempts.extend(_attempt(call, message.iteration, attempt) for attempt, call in attempts)
        return message

    def output(self, step: Step) -> bytes:
        """Return the output of a node as JSON, or an empty value if it has not succeeded.

        Raises:
            CallsNeeded: Calls must be added first.
        """
        record = self._cursor.nodes.get(step.number)
        if record is None or record.state is not NodeState.SUCCEEDED:
            return b""
        try:
            return strict_json.dumps_canonical(self._values.output(step))
        except ExpressionError:
            return b""

    @property
    def current(self) -> list[str]:
        """Paths of the nodes that are running or waiting, in the order in which they started."""
        steps = (self._graph.steps[number] for number in self._positions)
        return [step.path for step in steps if self._state(step) in _OPEN]

    @property
    def failed(self) -> str:
        """The path of the node whose failure fails the run, or an empty string if there is none."""
        failures_max = self._chunk.failures_max if self._chunk is not None else 0
        found = graphs.first_failure(self._graph, self._cursor, failures_max)
        return found.path if found is not None else ""

    def _has_run(self, step: Step) -> bool:
        record = self._cursor.nodes.get(step.number)
        if record is None or record.origin:
            return False
        return record.state not in _NEVER_RAN or record.start_ms != record.end_ms

    def _state(self, step: Step) -> pb.NodeState.ValueType:
        record = self._cursor.nodes.get(step.number)
        has_ended = self._run.state in ENDED
        if record is None or (record.is_open and has_ended):
            return pb.NODE_STATE_CANCELLED if has_ended else pb.NODE_STATE_PENDING
        call = self._last(step)
        waits = isinstance(step.node, WaitNode) or (call is not None and call.state in WITH_PEOPLE)
        return pb.NODE_STATE_WAITING if waits and record.is_open else _STATES[record.state]

    def _last(self, step: Step) -> Call | None:
        return next((self._calls[each] for each in reversed(self.calls_of(step)) if each in self._calls), None)

    def _node(self, step: Step) -> pb.NodeExecution:
        record, call = self._cursor.nodes.get(step.number), self._last(step)
        shown: dict[str, Any] = {"path": step.path, "kind": step.node.__struct_config__.tag, "state": self._state(step)}
        if step.item is not None:
            shown["item_index"] = step.item
        if record is None:
            return pb.NodeExecution(**shown)
        if step.number in self._positions:
            shown |= {"order": self._positions[step.number], "attempt": record.attempt, "iteration": record.iteration}
            shown |= self._times(record)
        if record.items is not None:
            shown["map"] = _map_fields(record)
        if call is not None:
            shown |= {"call_id": call.call_id, "child_run_id": call.child_run_id}
            decision = call.approval.decision if call.approval is not None else None
            shown["decided_by"] = decision.user_id if decision is not None else ""
        if record.reason and record.state in {NodeState.FAILED, NodeState.RETRYING}:
            shown["error"] = {"reason": record.reason, "message": record.message or _error_text(call)}
        return pb.NodeExecution(**shown, reused=bool(record.origin))

    def _times(self, record: NodeRecord) -> dict[str, Any]:
        times = {"start_time": record.start_ms, "end_time": None if record.is_open else record.end_ms}
        return {name: timestamp(self._cursor.start_time + ms / 1000) for name, ms in times.items() if ms is not None}

    def _result_bytes(self, call: Call | None) -> int:
        if call is None or call.result is None:
            return 0
        return self._omitted_bytes[call.call_id] or len(call.result.content_json)


def _map_fields(record: NodeRecord) -> dict[str, int]:
    items = record.items or 0
    running = sum(len(cursors.chunk_items(items, chunk)) for chunk in record.open_chunks)
    done = sum(len(cursors.chunk_items(items, chunk)) for chunk in range(record.chunks)) - running
    return {"items": items, "running": running, "succeeded": done - record.failed_items, "failed": record.failed_items}


def _chunk(call: Call, number: int, items: int) -> pb.MapChunkExecution:
    indexes = cursors.chunk_items(items, number)
    return pb.MapChunkExecution(
        run_id=call.child_run_id, first_index=indexes.start, items=len(indexes), state=_state_of(call)
    )


def _attempt(call: Call, iteration: int, attempt: int) -> pb.NodeAttempt:
    state, times = _state_of(call), {"start_time": call.create_time, "end_time": call.end_time}
    shown: dict[str, Any] = {name: timestamp(time) for name, time in times.items() if time is not None}
    if state == pb.NODE_STATE_FAILED:
        shown["error"] = {"reason": cursors.reason_of(call), "message": _error_text(call)}
    return pb.NodeAttempt(
        iteration=iteration,
        attempt=attempt,
        call_id=call.call_id,
        child_run_id=call.child_run_id,
        state=state,
        **shown,
    )


def _state_of(call: Call) -> pb.NodeState.ValueType:
    if not call.settled:
        return pb.NODE_STATE_WAITING if call.state in WITH_PEOPLE else pb.NODE_STATE_RUNNING
    if call.state is CallState.CANCELLED:
        return pb.NODE_STATE_CANCELLED
    return pb.NODE_STATE_SUCCEEDED if call.state is CallState.SUCCEEDED else pb.NODE_STATE_FAILED


def _error_text(call: Call | None) -> str:
    """Return the error in a call's result, or an empty string if it has none."""
    if call is None or call.result is None:
        return ""
    try:
        content = msgspec.json.decode(call.result.content_json)
    except msgspec.DecodeError:
        return ""
    text = content.get("error") if isinstance(content, dict) else None
    return text if isinstance(text, str) else ""
