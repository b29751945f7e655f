"""Ends and starts the nodes of a workflow run, given its calls, the events and the time."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.expression import ExpressionError
from pawl.agent_loop.loop.rules.state import State, checked_calls
from pawl.agent_loop.workflows import cursor as cursors
from pawl.agent_loop.workflows import drafting, graph
from pawl.agent_loop.workflows.cursor import NodeRecord, NodeState, WorkflowCursor
from pawl.agent_loop.workflows.definition import (
    ITEMS_MAX,
    AgentNode,
    CallNode,
    ConditionNode,
    HumanNode,
    MapNode,
    OutputNode,
    ParallelNode,
    ToolNode,
    WaitNode,
)
from pawl.agent_loop.workflows.graph import Graph, Step
from pawl.agent_loop.workflows.values import CallsNeeded, Values, event_of_token, is_too_large, time_of, value_of
from pawl.chassis import strict_json
from pawl.chassis.ids import CallId
from pawl.errors import InvalidJson

# Maximum number of open child runs per map.
_CHUNKS_OPEN_MAX: Final = 4


def cursor_of(state: State) -> WorkflowCursor:
    cursor, pinned = state.loop.cursor, state.run.workflow
    if isinstance(cursor, WorkflowCursor):
        return cursor
    if pinned is not None and pinned.start_state:
        return msgspec.json.decode(pinned.start_state, type=WorkflowCursor)
    return WorkflowCursor()


def _tolerated(node: MapNode, items: int) -> int:
    """Return how many of a map's items may fail."""
    limit = node.tolerate
    return items * int(limit.removesuffix("%")) // 100 if isinstance(limit, str) else limit


class Nodes:
    """The nodes of a run at a point in time.

    `settle` and `start` update the cursor. They also collect the calls that must be started or read.
    """

    def __init__(self, state: State, found: Graph, now: float) -> None:
        if state.run.workflow is None:
            raise RuntimeError("the run is not a workflow run")
        self._state, self._graph, self._pinned = state, found, state.run.workflow
        cursor = cursor_of(state)
        self._cursor = cursor if cursor.start_time else replace(cursor, start_time=now)
        self._cursor = cursors.recorded(self._cursor, state.run.run_id, state.calls.values())
        self._now, self._now_ms = now, self._cursor.milliseconds(now)
        # The nodes that have an open call.
        parsed = (cursors.parsed(call.call_id) for call in state.open_calls)
        self._with_calls = {found[0] for found in parsed if found is not None}
        # The nodes whose call the registry is checking.
        checks = (cursors.parsed(call_id) for call_id in checked_calls(state.under_way))
        self._checking = {found[0] for found in checks if found is not None}
        self._needed: set[CallId] = set()
        self._output: bytes | None = None
        self._output_text = ""
        self._events_taken = 0
        self._added: list[Call] = []
        self._drafts: list[Call] = []

    # Ending nodes.

    def settle(self) -> None:
        """Update the cursor until the calls, events and time cause no further changes."""
        while True:
            before = self._cursor
            changed = {step.number: self._ended(step) for step in self._graph.steps}
            known = {n: record for n, record in changed.items() if record is not self._cursor.nodes.get(n)}
            self._cursor = self._cursor.with_nodes({n: record for n, record in known.items() if record is not None})
            self._cursor = graph.advanced(self._graph, self._cursor, self._with_calls, self._now_ms)
            if self._cursor is before:
                return

    def _ended(self, step: Step) -> NodeRecord | None:
        record, node = self._cursor.nodes.get(step.number), step.node
        if record is None or record.state is not NodeState.RUNNING:
            return record
        if record.items is not None:
            return self._with_chunks(step, record, record.items)
        if isinstance(node, WaitNode):
            return self._with_event(step, record)
        if record.end_ms is None:
            return record
        repeat = node.repeat if isinstance(node, CallNode) else None
        if record.reason or record.stop or repeat is None:
            return self._with_output(step, record, graph.after_call(step, record, until=None))
        try:
            content = self._values().content(step, record)
            extra = {"output": value_of(node, content), "iteration": record.iteration}
            until = self._values().rendered(repeat.until, step, extra)
        except CallsNeeded as needed:
            self._needed |= needed.call_ids
            return record
        except ExpressionError as error:
            return graph.failed(record, record.end_ms, "EXPRESSION_FAILED", f"repeat.until: {error}")
        if not isinstance(until, bool):
            return graph.failed(record, record.end_ms, "EXPRESSION_FAILED", "repeat.until must be true or false")
        return graph.after_call(step, record, until=until)

    def _with_output(self, step: Step, record: NodeRecord, after: NodeRecord) -> NodeRecord:
        """Return `after`, or a failure if the node has ended but its value cannot be evaluated."""
        is_default = isinstance(step.node, HumanNode) and after.value is True
        is_json = isinstance(step.node, AgentNode) and step.node.output_schema is not None
        if after.state is not NodeState.SUCCEEDED or not (is_default or is_json):
            return after
        cursor = self._cursor.with_nodes({step.number: after})
        values = Values(self._state.run, self._pinned, self._graph, cursor)
        try:
            values.with_calls(self._state.calls, self._state.named).output(step)
        except CallsNeeded as needed:
            self._needed |= needed.call_ids
            return record
        except ExpressionError as error:
            return graph.failed(after, after.end_ms or self._now_ms, "EXPRESSION_FAILED", str(error))
        return after

    def _with_chunks(self, step: Step, record: NodeRecord, items: int) -> NodeRecord:
        """Return the state of a map after some of its chunks have ended.

        If the map has failed, its other chunks are stopped first.
        """
        if record.open_chunks:
            return replace(record, stop=graph.DECIDED) if record.reason and not record.stop else record
        if record.reason:
            return graph.after_call(step, replace(record, end_ms=self._now_ms), until=None)
        is_done = record.chunks == cursors.chunk_count(items)
        return replace(record, state=NodeState.SUCCEEDED, end_ms=self._now_ms, stop="") if is_done else record

    def _with_event(self, step: Step, record: NodeRecord) -> NodeRecord:
        wanted = {step.node.event, event_of_token(step.path)} if isinstance(step.node, WaitNode) else set()
        event = next((event for event in self._cursor.events if event[0] in wanted), None)
        if event is None or record.stop:
            return record
        left = tuple(each for each in self._cursor.events if each is not event)
        self._cursor = replace(self._cursor, events=left)
        self._events_taken += 1
        return replace(record, state=NodeState.SUCCEEDED, end_ms=self._now_ms, event=event[1])

    # Starting nodes.

    def start(self) -> bool:
        """Start nodes until the cursor changes, because a change can affect the order.

        Return whether it has changed.
        """
        if self._cursor.is_paused or self._cursor.failure is not None:
            return False
        # If the cursor has changed, nodes that were about to start may no longer be allowed to.
        before, self._drafts, self._added = self._cursor, [], []
        maps = graph.open_maps(self._graph, self._cursor)
        for step in (*maps, *graph.ready(self._graph, self._cursor, self._checking, self._now_ms)):
            record = self._cursor.nodes.get(step.number)
            try:
                self._start_node(step, record)
            except CallsNeeded as needed:
                self._needed |= needed.call_ids
            except ExpressionError as error:
                self._put(step, graph.failed(self._new(record), self._now_ms, "EXPRESSION_FAILED", str(error)))
            if self._cursor is not before:
                return True
        return False

    def _start_node(self, step: Step, record: NodeRecord | None) -> None:
        node, values = step.node, self._values()
        started = self._new(record)
        match node:
            case ToolNode():
                self._drafts.append(drafting.of_node(values, step, record, self._state.run, self._now))
            case ConditionNode():
                value = values.rendered(node.if_, step)
                if not isinstance(value, bool):
                    raise ExpressionError("the condition must be true or false")
                self._put(step, replace(started, state=NodeState.SUCCEEDED, end_ms=self._now_ms, value=value))
            case OutputNode():
                self._set_output(step, started, values.rendered(node.value, step))
            case ParallelNode():
                self._put(step, started)
            case WaitNode():
                self._put(step, replace(started, due_ms=self._due_ms(step, node)))
            case MapNode() if record is None:
                self._start_map(step, node, started)
            case MapNode():
                self._start_chunks(step, node, self._cursor.nodes[step.number])
            case HumanNode() if drafting.has_too_few_approvers(node, self._state.run):
                needed = self._state.run.options.approvals_required
                message = f"The run requires {needed} approvals, but this node asks one person: set who to approvers."
                self._put(step, graph.failed(started, self._now_ms, "TOO_FEW_APPROVERS", message))
            case _:
                self._added.append(drafting.of_node(values, step, record, self._state.run, self._now))

    def _start_map(self, step: Step, node: MapNode, started: NodeRecord) -> None:
        items = self._values().rendered(node.items, step)
        if not isinstance(items, list):
            message = f"items must be a list, but it is {type(items).__name__}."
            return self._put(step, graph.failed(started, self._now_ms, "MAP_NOT_A_LIST", message))
        if len(items) > ITEMS_MAX:
            message = f"items has {len(items)} entries; at most {ITEMS_MAX} are allowed."
            return self._put(step, graph.failed(started, self._now_ms, "MAP_TOO_LARGE", message))
        self._put(step, replace(started, items=len(items), tolerate=_tolerated(node, len(items))))
        return None

    def _start_chunks(self, step: Step, node: MapNode, record: NodeRecord) -> None:
        """Start runs for the next items of a map, and divide its `concurrency` among its open runs."""
        total = cursors.chunk_count(record.items or 0)
        share = -(-node.concurrency // min(_CHUNKS_OPEN_MAX, total, node.concurrency))
        free = node.concurrency - sum(
            drafting.items_of(call).concurrency
            for call in self._state.open_calls
            if (found := cursors.parsed(call.call_id)) is not None and found[0] == step.number
        )
        items = self._values().rendered(node.items, step) if free > 0 else []
        for number in range(record.chunks, total):
            if free <= 0:
                return
            chunk = drafting.Chunk(number, record.tolerate - record.failed_items, min(share, free))
            self._added.append(drafting.of_chunk(step, items, chunk, self._state.run, self._now))
            free -= share

    def conclude(self) -> None:
        """Set the output of a run for items of a map, once all the items have ended."""
        if self._pinned.chunk is None or self._state.run.output_json:
            return
        if not graph.has_ended(self._graph, self._cursor):
            return
        try:
            outputs = [self._values().output(step) for step in self._graph.steps]
        except CallsNeeded as needed:
            self._needed |= needed.call_ids
            return
        records = (self._cursor.nodes[step.number] for step in self._graph.steps)
        reasons = [record.reason for record in records if record.state is NodeState.FAILED]
        found = {"failed": len(reasons), "outputs": outputs, "reason": reasons[-1] if reasons else ""}
        output_json = msgspec.json.encode(found)
        if is_too_large(output_json):
            message = f"The outputs of {len(outputs)} items are {len(output_json)} bytes."
            self._cursor = replace(self._cursor, failure=("OUTPUT_TOO_LARGE", message))
        else:
            self._output = output_json

    def _due_ms(self, step: Step, node: WaitNode) -> int | None:
        if node.event is not None:
            return None
        if node.seconds is not None:
            return self._now_ms + round(node.seconds * 1000)
        return self._cursor.milliseconds(time_of(self._values().rendered(node.until, step)))

    def _set_output(self, step: Step, started: NodeRecord, value: Any) -> None:
        try:
            output_json = strict_json.dumps_canonical(value)
        except InvalidJson as error:
            raise ExpressionError(f"the output is not allowed: {error.message}") from None
        if is_too_large(output_json):
            message = f"The output is {len(output_json)} bytes."
            return self._put(step, graph.failed(started, self._now_ms, "OUTPUT_TOO_LARGE", message))
        self._output, self._output_text = output_json, value if isinstance(value, str) else output_json.decode()
        return self._put(step, replace(started, state=NodeState.SUCCEEDED, end_ms=self._now_ms))

    def _put(self, step: Step, record: NodeRecord) -> None:
        self._cursor = self._cursor.with_nodes({step.number: record})

    def _new(self, record: NodeRecord | None) -> NodeRecord:
        if record is None:
            return NodeRecord(state=NodeState.RUNNING, start_ms=self._now_ms)
        return replace(record, state=NodeState.RUNNING, start_ms=self._now_ms, due_ms=None, reason="")

    def _values(self) -> Values:
        values = Values(self._state.run, self._pinned, self._graph, self._cursor)
        return values.with_calls(self._state.calls, self._state.named)
