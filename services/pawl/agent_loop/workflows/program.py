"""Implements a workflow's program: nodes start once the nodes before them have ended, until all have ended.

Its cursor holds the state of each node. A node that makes a call ends when the call has its result. The id of the call
is derived from the run, the node, the iteration and the attempt, so that no call is made twice.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import settle
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.decision import (
    Advance,
    Decision,
    Fail,
    Finish,
    Propose,
    ReadCalls,
    ReadProgram,
    Settle,
    StopCalls,
    Wait,
)
from pawl.agent_loop.loop.rules.expression import ExpressionError
from pawl.agent_loop.loop.rules.fact import Command, Event, OwnerEvent, Pause, Warned
from pawl.agent_loop.loop.rules.run import Delegation, FailureClass, RunFailure
from pawl.agent_loop.loop.rules.state import READ, State, checked_calls, stop_of
from pawl.agent_loop.workflows import children, drafting, graph
from pawl.agent_loop.workflows import cursor as cursors
from pawl.agent_loop.workflows.cursor import EVENTS_MAX, NodeRecord, NodeState, WorkflowCursor
from pawl.agent_loop.workflows.definition import (
    ITEMS_MAX,
    CallNode,
    ConditionNode,
    MapNode,
    OutputNode,
    ParallelNode,
    ToolNode,
    WaitNode,
)
from pawl.agent_loop.workflows.graph import Graph, Step
from pawl.agent_loop.workflows.values import CallsNeeded, Values, is_too_large, time_of, value_of
from pawl.chassis import strict_json
from pawl.chassis.ids import CallId
from pawl.values import CallState, RunState, WaitKind

_STOPPED: Final = "The node was stopped before this call ended."


def follows(state: State, now: float) -> Decision:
    found = state.graph
    if found is None:
        return ReadProgram()
    return _Moment(state, found, now).decision()


def proposes(state: State, call_id: CallId, now: float) -> bool:
    return state.graph is not None and _Moment(state, state.graph, now).proposes(call_id)


def reported(base: State, after: State) -> State:
    """Record the calls that have changed."""
    changed = [call for call_id, call in after.calls.items() if base.calls.get(call_id) is not call]
    cursor = _cursor(after)
    recorded = cursors.recorded(cursor, after.run.run_id, changed)
    return after if recorded is cursor else _with_cursor(after, recorded)


def told(base: State, after: State) -> tuple[OwnerEvent, ...]:
    """Warn of events that were dropped. The events of calls report everything else."""
    if _cursor(after).events_dropped == _cursor(base).events_dropped:
        return ()
    message = f"The oldest event was dropped: {EVENTS_MAX} events are waiting for a node."
    return (Warned(reason="EVENT_DROPPED", message=message),)


def child(state: State, call: Call, delegation: Delegation) -> Delegation:
    return children.of_agent(state, call, delegation)


def concluded(state: State, *, continues: bool) -> State:  # noqa: ARG001  # the output is set when its node ends
    return state


def commanded(state: State, command: Command, now: float) -> State:
    """Pause or resume the run, or keep an event for the nodes that wait for it."""
    cursor = _cursor(state)
    match command.kind:
        case Pause() as pause:
            return _with_cursor(state, replace(cursor, is_paused=not pause.resumes))
        case Event() as event:
            number = cursor.events_received + 1
            kept = (*cursor.events, (event.name, number))
            # The newest events are kept: a node may be waiting for them.
            dropped = cursor.events_dropped + max(0, len(kept) - EVENTS_MAX)
            cursor = replace(cursor, events=kept[-EVENTS_MAX:], events_received=number, events_dropped=dropped)
            call = drafting.of_event(state.run, number, event.name, event.payload_json, now)
            return _with_cursor(state.with_calls([call]), cursor)
        case _:
            return state


def _with_cursor(state: State, cursor: WorkflowCursor) -> State:
    return replace(state, loop=replace(state.loop, cursor=cursor))


def _cursor(state: State) -> WorkflowCursor:
    cursor, pinned = state.loop.cursor, state.run.workflow
    if isinstance(cursor, WorkflowCursor):
        return cursor
    if pinned is not None and pinned.start_state:
        return msgspec.json.decode(pinned.start_state, type=WorkflowCursor)
    return WorkflowCursor()


class _Moment:
    """A run's state at one time, and what follows from it."""

    def __init__(self, state: State, found: Graph, now: float) -> None:
        if state.run.workflow is None:
            raise RuntimeError("the run is not a workflow run")
        self._state, self._graph, self._pinned = state, found, state.run.workflow
        cursor = _cursor(state)
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
        self._added: list[Call] = []
        self._drafts: list[Call] = []

    def decision(self) -> Decision:
        state, before = self._state, _cursor(self._state)
        while True:
            self._settle()
            try:
                failure = self._failure()
            except CallsNeeded as needed:
                is_read = READ in state.under_way
                return Wait(until=None) if is_read else ReadCalls(call_ids=tuple(sorted(needed.call_ids)))
            if failure is not None or not self._start():
                break
        if failure is None:
            self._conclude()
        elif self._drains():
            failure = self._drained(failure)
        if self._cursor != before or self._added or self._output is not None:
            return Advance(
                cursor=self._cursor,
                calls=tuple(self._added),
                output_json=self._output,
                output_text=self._output_text,
            )
        if failure is not None:
            return Fail(failure=failure)
        stopping = self._stopping()
        if stopping is not None:
            return stopping
        if self._needed and READ not in state.under_way:
            return ReadCalls(call_ids=tuple(sorted(self._needed)))
        if self._drafts:
            return Propose(calls=tuple(self._drafts))
        has_ended = graph.has_ended(self._graph, self._cursor) and self._cursor.failure is None
        if has_ended and not state.open_calls and not self._needed:
            return Finish(state=RunState.COMPLETED)
        return self._wait()

    def proposes(self, call_id: CallId) -> bool:
        """Return whether a node still needs this call."""
        self._settle()
        found = cursors.parsed(call_id)
        if found is None or self._cursor.is_paused or self._cursor.failure or self._first_failure() is not None:
            return False
        number, key = found
        step = self._graph.steps[number]
        is_next = drafting.key_of(self._cursor.nodes.get(number)) == key
        return is_next and graph.is_ready(self._graph, self._cursor, step, self._now_ms)

    # Nodes that end.

    def _settle(self) -> None:
        """Update the cursor until nothing more follows from the calls, the events and the time."""
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
        if isinstance(node, MapNode) and record.end_ms is None and record.items is not None:
            is_done = record.chunks * graph.CHUNK_ITEMS >= record.items
            return replace(record, state=NodeState.SUCCEEDED, end_ms=self._now_ms, stop="") if is_done else record
        if isinstance(node, WaitNode):
            return self._with_event(step, record)
        if record.end_ms is None:
            return record
        repeat = node.repeat if isinstance(node, CallNode) else None
        if record.reason or record.stop or repeat is None:
            return graph.after_call(step, record, until=None)
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
            return graph.failed(record, record.end_ms, "EXPRESSION_FAILED", "repeat.until must be true or false.")
        return graph.after_call(step, record, until=until)

    def _with_event(self, step: Step, record: NodeRecord) -> NodeRecord:
        wanted = step.node.event if isinstance(step.node, WaitNode) else None
        event = next((event for event in self._cursor.events if event[0] == wanted), None)
        if event is None or record.stop:
            return record
        left = tuple(each for each in self._cursor.events if each is not event)
        self._cursor = replace(self._cursor, events=left)
        return replace(record, state=NodeState.SUCCEEDED, end_ms=self._now_ms, event=event[1])

    # Nodes that start.

    def _start(self) -> bool:
        """Start nodes until the cursor changes, which can change the order. Return whether it has changed."""
        if self._cursor.is_paused or self._cursor.failure is not None:
            return False
        # If the cursor has changed, nodes that were about to start may no longer be allowed to.
        before, self._drafts, self._added = self._cursor, [], []
        chunks = graph.next_chunks(self._graph, self._cursor, self._with_calls)
        for step in (*chunks, *graph.ready(self._graph, self._cursor, self._checking, self._now_ms)):
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
        self._put(step, replace(started, items=len(items)))
        return None

    def _conclude(self) -> None:
        """Set the output of a run that processes items of a map, once all of them have ended."""
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
        failures = sum(record.state is NodeState.FAILED for record in records)
        self._output = strict_json.dumps_canonical({"failed": failures, "outputs": outputs})

    def _due_ms(self, step: Step, node: WaitNode) -> int | None:
        if node.event is not None:
            return None
        if node.seconds is not None:
            return self._now_ms + round(node.seconds * 1000)
        return self._cursor.milliseconds(time_of(self._values().rendered(node.until, step)))

    def _set_output(self, step: Step, started: NodeRecord, value: Any) -> None:
        output_json = strict_json.dumps_canonical(value)
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

    # Calls to stop, and the end.

    def _stopping(self) -> Decision | None:
        """Return how to stop the calls of nodes that are being stopped, and of maps that start no more chunks."""
        state, to_stop = self._state, []
        for call in state.open_calls:
            found = cursors.parsed(call.call_id)
            record = None if found is None else self._cursor.nodes.get(found[0])
            if record is None or not record.stop:
                continue
            if call.state is not CallState.RUNNING and not call.asks_in_mid_execution:
                return Settle(calls=(settle.withdrawn(call, _STOPPED, self._now),))
            if stop_of(call.call_id) not in state.under_way:
                to_stop.append(call.call_id)
        return StopCalls(call_ids=tuple(to_stop)) if to_stop else None

    def _drains(self) -> bool:
        """Return whether running calls may end before the run fails, because their effects will or may be undone.

        A stopped call may or may not have taken effect.
        """
        step = self._first_failure()
        is_drained = step is not None and (self._pinned.chunk is not None or step.node.on_error == "undo")
        return self._cursor.failure is not None or is_drained

    def _drained(self, failure: RunFailure) -> RunFailure | None:
        """Stop all nodes without a running call, and undo all effects once no call is open, except in part of a map.

        Return the failure once nothing is left to do; None before.
        """
        if self._cursor.failure is None:
            self._cursor = replace(self._cursor, failure=(failure.reason, failure.message))
        running = (call for call in self._state.open_calls if call.state is CallState.RUNNING)
        kept = {found[0] for call in running if (found := cursors.parsed(call.call_id)) is not None}
        opened = {n: each for n, each in self._cursor.nodes.items() if each.is_open and not each.stop and n not in kept}
        if opened:
            stopped = {n: replace(record, stop=cursors.CANCELLED) for n, record in opened.items()}
            self._cursor = self._cursor.with_nodes(stopped)
            self._settle()
        self._added, self._drafts = [], []
        if self._state.open_calls or opened:
            return None
        if self._cursor.is_undone or self._pinned.chunk is not None:
            return failure
        self._added = [drafting.of_undo(self._state.run, self._now)]
        return None

    def _failure(self) -> RunFailure | None:
        if self._cursor.failure is not None:
            reason, message = self._cursor.failure
            return RunFailure(failure_class=FailureClass.TOOL, reason=reason, message=message)
        limit = self._graph.definition.timeout_seconds
        if limit is not None and self._pinned.chunk is None and self._now_ms >= limit * 1000:
            message = f"The workflow took more than {limit:g} seconds."
            return RunFailure(failure_class=FailureClass.LIMIT, reason="RUN_TIMEOUT", message=message)
        step = self._first_failure()
        error = None if step is None else self._values().error(step)
        if step is None or error is None:
            return None
        message = f"Node {step.path}: {error['message'] or error['reason']}"
        return RunFailure(failure_class=FailureClass.TOOL, reason=error["reason"], message=message[:1000])

    def _first_failure(self) -> Step | None:
        failures_max = self._pinned.chunk.failures_max if self._pinned.chunk is not None else 0
        return graph.first_failure(self._graph, self._cursor, failures_max)

    def _wait(self) -> Wait:
        due_ms = graph.next_time(self._graph, self._cursor)
        limit = self._graph.definition.timeout_seconds
        due_times = [] if due_ms is None else [self._cursor.start_time + due_ms / 1000]
        if limit is not None and self._pinned.chunk is None:
            due_times.append(self._cursor.start_time + limit)
        waits = [WaitKind.PAUSED] if self._cursor.is_paused else []
        if any(self._awaits_event(step) for step in self._graph.steps):
            waits.append(WaitKind.EVENT)
        return Wait(until=min(due_times, default=None), waits=tuple(waits))

    def _awaits_event(self, step: Step) -> bool:
        record = self._cursor.nodes.get(step.number)
        is_running = record is not None and record.state is NodeState.RUNNING
        return is_running and isinstance(step.node, WaitNode) and step.node.event is not None

    def _values(self) -> Values:
        values = Values(self._state.run, self._pinned, self._graph, self._cursor)
        return values.with_calls(self._state.calls, self._state.named)
