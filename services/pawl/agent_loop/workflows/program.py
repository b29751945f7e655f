"""Implements a workflow. A node starts once the nodes before it have ended, and the run ends when all nodes have ended.

The program's cursor holds the state of each node. A node that makes a call ends when the call has its result. The id of
the call is derived from the run, the node, the iteration and the attempt, so that no call is made twice.
"""

from __future__ import annotations

from typing import Final

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
from pawl.agent_loop.loop.rules.fact import Command, Event, OwnerEvent, Pause
from pawl.agent_loop.loop.rules.program import Program
from pawl.agent_loop.loop.rules.run import Delegation, FailureClass, RunFailure
from pawl.agent_loop.loop.rules.state import READ, State, stop_of
from pawl.agent_loop.workflows import children, drafting, graph
from pawl.agent_loop.workflows import cursor as cursors
from pawl.agent_loop.workflows.cursor import NodeState, WorkflowCursor
from pawl.agent_loop.workflows.definition import WaitNode
from pawl.agent_loop.workflows.graph import Step
from pawl.agent_loop.workflows.nodes import Nodes, cursor_of
from pawl.agent_loop.workflows.values import CallsNeeded
from pawl.chassis.ids import CallId
from pawl.values import CallState, RunState, WaitKind

_STOPPED: Final = "The node was stopped before this call ended."


class WorkflowProgram(Program):
    def follows(self, state: State, now: float) -> Decision:
        found = state.graph
        if found is None:
            return ReadProgram()
        return _Moment(state, found, now).decision()

    def proposes(self, state: State, call_id: CallId, now: float) -> bool:
        return state.graph is not None and _Moment(state, state.graph, now).proposes(call_id)

    def commanded(self, state: State, command: Command, now: float) -> State:
        """Pause or resume the run, or store an event for the nodes that wait for it."""
        cursor = cursor_of(state)
        match command.kind:
            case Pause() as pause:
                return _with_cursor(state, replace(cursor, is_paused=not pause.resumes))
            case Event() as event:
                number = cursor.events_received + 1
                # The ledger limits the number of events that no node has consumed.
                events = (*cursor.events, (event.name, number))
                cursor = replace(cursor, events=events, events_received=number)
                call = drafting.of_event(state.run, number, event.name, event.payload_json, now)
                return _with_cursor(state.with_calls([call]), cursor)
            case _:
                return state

    def reported(self, base: State, after: State) -> tuple[State, tuple[OwnerEvent, ...]]:
        """Record the calls that have changed."""
        changed = [call for call_id, call in after.calls.items() if base.calls.get(call_id) is not call]
        cursor = cursor_of(after)
        recorded = cursors.recorded(cursor, after.run.run_id, changed)
        return (after if recorded is cursor else _with_cursor(after, recorded)), ()

    def child(self, state: State, call: Call, delegation: Delegation) -> Delegation:
        return children.of_agent(state, call, delegation)


def _with_cursor(state: State, cursor: WorkflowCursor) -> State:
    return replace(state, loop=replace(state.loop, cursor=cursor))


class _Moment(Nodes):
    """The next steps of a run, based on its state and the time."""

    def decision(self) -> Decision:
        state, before = self._state, cursor_of(self._state)
        while True:
            self.settle()
            try:
                failure = self._failure()
            except CallsNeeded as needed:
                is_read = READ in state.under_way
                return Wait(until=None) if is_read else ReadCalls(call_ids=tuple(sorted(needed.call_ids)))
            if failure is not None or not self.start():
                break
        if failure is None:
            self.conclude()
        elif self._drains():
            failure = self._drained(failure)
        if self._cursor != before or self._added or self._output is not None:
            return Advance(
                cursor=self._cursor,
                calls=tuple(self._added),
                output_json=self._output,
                output_text=self._output_text,
                events_taken=self._events_taken,
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
        self.settle()
        found = cursors.parsed(call_id)
        if found is None or self._cursor.is_paused or self._cursor.failure or self._first_failure() is not None:
            return False
        number, key = found
        step = self._graph.steps[number]
        is_next = drafting.key_of(self._cursor.nodes.get(number)) == key
        return is_next and graph.is_ready(self._graph, self._cursor, step, self._now_ms)

    # Calls to stop, and the end.

    def _stopping(self) -> Decision | None:
        """Return how to stop the calls of stopping nodes, and of maps that start no more chunks."""
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
        """Return whether running calls may finish before the run fails, because their effects will or may be undone.

        If a call were stopped, it would be unclear whether it took effect.
        """
        step = self._first_failure()
        is_drained = step is not None and (self._pinned.chunk is not None or step.node.on_error == "undo")
        return self._cursor.failure is not None or is_drained

    def _drained(self, failure: RunFailure) -> RunFailure | None:
        """Stop nodes that have no running call.

        Once no call is open, undo all effects, unless the run is part of a map. Return the failure once nothing is left
        to do, and None until then.
        """
        if self._cursor.failure is None:
            self._cursor = replace(self._cursor, failure=(failure.reason, failure.message))
        running = (call for call in self._state.open_calls if call.state is CallState.RUNNING)
        kept = {found[0] for call in running if (found := cursors.parsed(call.call_id)) is not None}
        opened = {n: each for n, each in self._cursor.nodes.items() if each.is_open and not each.stop and n not in kept}
        if opened:
            stopped = {n: replace(record, stop=cursors.CANCELLED) for n, record in opened.items()}
            self._cursor = self._cursor.with_nodes(stopped)
            self.settle()
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
