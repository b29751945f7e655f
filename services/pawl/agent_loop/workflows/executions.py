"""Reads workflow runs, with the calls of their nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final, NamedTuple

import msgspec

from pawl.agent.v1 import workflow_pb2 as pb
from pawl.agent.v1.agent_pb2 import ListCallsRequest
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules import loop_state
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.undo import rules as undo
from pawl.agent_loop.undo.rules import UndoSource, UndoState
from pawl.agent_loop.workflows import cursor as cursors
from pawl.agent_loop.workflows import mermaid
from pawl.agent_loop.workflows import rerun as reruns
from pawl.agent_loop.workflows.cursor import WorkflowCursor
from pawl.agent_loop.workflows.execution import SHOWN_BYTES_MAX, Execution
from pawl.agent_loop.workflows.graph import Graph, Step
from pawl.agent_loop.workflows.reading import Graphs
from pawl.agent_loop.workflows.rerun import Rerun
from pawl.agent_loop.workflows.values import CallsNeeded
from pawl.chassis.identity.auth import Principal, for_user
from pawl.chassis.ids import CallId, RunId
from pawl.chassis.rpc.client import translated
from pawl.errors import CallNotFound, InvalidField, NodeNotFound, RunNotEnded, RunNotFound
from pawl.event.v1 import call_pb2, run_pb2
from pawl.event.v1.workflow_pb2 import NodeExecution
from pawl.values import ENDED

_READS_AT_ONCE_MAX: Final = 16
_CALLS_PER_PAGE: Final = 200
# Limits of a preview: the effects that it lists, and the runs that it reads.
_EFFECTS_MAX: Final = 1000
_RUNS_MAX: Final = 200
_EFFECT_FIELDS: Final = (
    *("store_id", "conversation_id", "run_id", "call_id", "tool_name", "tool_version", "state", "category"),
    *("effect_class", "create_time", "start_time", "end_time"),
)


class WorkflowRun(NamedTuple):
    run: run_pb2.Run
    graph: Graph
    cursor: WorkflowCursor

    def step(self, path: str) -> Step:
        """Return the node at a path.

        Raises:
            NodeNotFound
        """
        found = self.graph.step(path)
        if found is None:
            raise NodeNotFound(f"node: the workflow has no node {path!r:.100}", node=path[:100])
        return found


class Executions:
    def __init__(self, ledger: PublicLedger, graphs: Graphs) -> None:
        self._ledger = ledger
        self._graphs = graphs

    async def run(self, caller: Principal, run_id: RunId) -> WorkflowRun:
        """Return one of the caller's workflow runs.

        Raises:
            RunNotFound: also if the run is not a workflow run.
        """
        run = await self._ledger.get_run(caller, run_id)
        if not run.HasField("workflow"):
            raise RunNotFound("the run is not a workflow run")
        pinned = wire.WORKFLOW.read(run.workflow)
        graph = await self._graphs.of(caller.store_id, pinned)
        read = await self._ledger.get_run_as_service(caller, run_id, with_loop_state=True)
        cursor: object = loop_state.read(read.loop_state).cursor
        if not isinstance(cursor, WorkflowCursor):
            # The run has not started.
            cursor = msgspec.json.decode(pinned.start_state or b'{"program": "workflow"}', type=WorkflowCursor)
        return WorkflowRun(run, graph, cursor)

    async def get(self, caller: Principal, run_id: RunId, node: str) -> pb.GetExecutionResponse:
        """Return the nodes of a workflow run; with `node`, only this node, with its whole values.

        Raises:
            RunNotFound, NodeNotFound
        """
        found = await self.run(caller, run_id)
        execution, chart = Execution(wire.RUN.read(found.run), found.graph, found.cursor), ""
        if node:
            nodes = [await self._node(caller, execution, found.step(node))]
        else:
            execution.add_calls(await self._calls(caller, execution.last_calls), bytes_max=SHOWN_BYTES_MAX)
            nodes = execution.tree()
            await self._count_items(caller, execution, nodes)
            if found.graph.mapping is None:
                chart = mermaid.flowchart(found.graph.definition, execution.states)
        shown = run_pb2.Run()
        shown.CopyFrom(found.run)
        for field in ("pending_calls", "active_calls"):
            shown.ClearField(field)
        return pb.GetExecutionResponse(
            run=shown,
            nodes=nodes,
            current_nodes=execution.current,
            failed_node=execution.failed,
            paused=found.cursor.is_paused,
            mermaid=chart,
        )

    async def _node(self, caller: Principal, execution: Execution, step: Step) -> NodeExecution:
        needed = frozenset(execution.calls_of(step))
        # Each round reads the calls that the previous round lacked. The loop ends if none of them exist.
        while True:
            read = await self._calls(caller, needed)
            execution.add_calls(read)
            try:
                return execution.node(step)
            except CallsNeeded as error:
                needed = error.call_ids
                if not read:
                    raise CallNotFound from None

    async def _count_items(self, caller: Principal, execution: Execution, nodes: Iterable[NodeExecution]) -> None:
        """Count the items that have succeeded in the open child runs of maps."""
        for node in nodes:
            await self._count_items(caller, execution, node.nodes)
            for run_id in execution.open_runs(node.path) if node.map.running else ():
                child = await self._ledger.get_run(caller, run_id)
                counts = {each.state: each.count for each in child.call_counts}
                done = min(node.map.running, counts.get(call_pb2.CALL_STATE_SUCCEEDED, 0))
                node.map.succeeded, node.map.running = node.map.succeeded + done, node.map.running - done

    async def _calls(self, caller: Principal, call_ids: Iterable[CallId]) -> list[Call]:
        """Return those of the calls that exist."""
        slots = asyncio.Semaphore(_READS_AT_ONCE_MAX)

        async def read(call_id: CallId) -> Call | None:
            async with slots:
                try:
                    return wire.CALL.read(await self._ledger.get_call(caller, call_id))
                except CallNotFound:
                    return None

        found = await asyncio.gather(*map(read, sorted(call_ids)))
        return [call for call in found if call is not None]

    async def rerun(self, caller: Principal, run_id: RunId, node: str) -> tuple[WorkflowRun, Rerun]:
        """Return how an ended run would run again from a node.

        Raises:
            RunNotFound, NodeNotFound, RunNotEnded
            InvalidField: the run processes items of a map for another run.
        """
        found = await self.run(caller, run_id)
        if found.run.state not in ENDED:
            raise RunNotEnded("the run has not ended: wait for its end, or cancel it first")
        if found.run.workflow.HasField("chunk"):
            problem = f"run_id: the run is part of run {found.run.parent_run_id}: run that again"
            raise InvalidField(problem, field="run_id")
        return found, reruns.rerun(found.graph, found.cursor, run_id, found.step(node).number)

    async def effects(self, caller: Principal, found: WorkflowRun, again: frozenset[int]) -> list[call_pb2.Call]:
        """Return the calls of these nodes and of the runs below them that had, or may have had, effects."""
        run_id = RunId(found.run.run_id)
        waiting, seen, effects = [run_id], {run_id}, list[call_pb2.Call]()
        while waiting and len(effects) < _EFFECTS_MAX:
            async for call in self._listed(caller, waiting.pop(0)):
                parsed = cursors.parsed(CallId(call.call_id)) if call.run_id == run_id else None
                if parsed is not None and parsed[0] not in again:
                    continue
                below = RunId(call.child_run_id)
                if below and below not in seen and len(seen) < _RUNS_MAX:
                    seen.add(below)
                    waiting.append(below)
                elif not below and _had_effect(call):
                    effects.append(_shown(call))
        effects.sort(key=lambda call: call.create_time.ToNanoseconds(), reverse=True)
        return effects[:_EFFECTS_MAX]

    async def _listed(self, caller: Principal, run_id: RunId) -> AsyncIterator[call_pb2.Call]:
        stub = AgentServiceStub(self._ledger.channel)
        request = ListCallsRequest(run_id=run_id, page_size=_CALLS_PER_PAGE)
        while True:
            page = await translated(stub.ListCalls(request, metadata=for_user(caller)))
            for call in page.calls:
                yield call
            request.page_token = page.next_page_token
            if not page.next_page_token:
                return


def _had_effect(call: call_pb2.Call) -> bool:
    return undo.outcome_of(UndoSource(call=wire.CALL.read(call))).state is not UndoState.NOTHING_TO_UNDO


def _shown(call: call_pb2.Call) -> call_pb2.Call:
    shown: dict[str, Any] = {field.name: value for field, value in call.ListFields() if field.name in _EFFECT_FIELDS}
    return call_pb2.Call(**shown)
