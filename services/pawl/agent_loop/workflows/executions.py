"""Reads workflow runs, with the calls of their nodes."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec

from pawl.agent.v1 import workflow_pb2 as pb
from pawl.agent.v1.agent_pb2 import ListCallsRequest
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules import loop_state
from pawl.agent_loop.undo import rules as undo
from pawl.agent_loop.undo.planning import sources
from pawl.agent_loop.undo.rules import UndoSource, UndoState
from pawl.agent_loop.workflows import cursor as cursors
from pawl.agent_loop.workflows import rerun as reruns
from pawl.agent_loop.workflows.cursor import ENDED as ENDED_NODES
from pawl.agent_loop.workflows.cursor import NodeRecord, WorkflowCursor
from pawl.agent_loop.workflows.definition import WaitNode
from pawl.agent_loop.workflows.edges import edges as edges_of
from pawl.agent_loop.workflows.edges import incoming
from pawl.agent_loop.workflows.execution import Execution
from pawl.agent_loop.workflows.graph import Graph, Step
from pawl.agent_loop.workflows.reading import Graphs
from pawl.agent_loop.workflows.rerun import Rerun
from pawl.agent_loop.workflows.values import CallsNeeded, event_of_token, wait_token
from pawl.chassis.identity.auth import Principal, for_user
from pawl.chassis.ids import CallId, RunId, UserId, check_id
from pawl.chassis.rpc.client import translated
from pawl.errors import (
    CallNotFound,
    CallNotPending,
    CompletionNotFound,
    InvalidField,
    InvalidId,
    NodeNotFound,
    RunNotEnded,
    RunNotFound,
)
from pawl.event.v1 import call_pb2, run_pb2
from pawl.event.v1.workflow_pb2 import NodeExecution, WorkflowEdge
from pawl.values import ENDED

# Limit for results read with the tree, which shows only their errors.
_SHOWN_BYTES_MAX: Final = 4 * 1024
# Limit for the output of one node.
_OUTPUT_BYTES_MAX: Final = 1024 * 1024
_CALLS_PER_PAGE: Final = 200
_TOKEN_CHARACTERS_MAX: Final = 200
# Limits of a preview.
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

    async def named(self, caller: Principal, run_id: RunId) -> run_pb2.Run:
        """Return one of the caller's workflow runs, without its nodes.

        Raises:
            RunNotFound: The run does not exist or is not a workflow run.
        """
        run = await self._ledger.get_run(caller, run_id)
        if not run.HasField("workflow"):
            raise RunNotFound("the run is not a workflow run")
        return run

    async def check_event(self, caller: Principal, run_id: RunId, name: str) -> None:
        """Check that a run's workflow has a node that waits for this event.

        Raises:
            RunNotFound: The run does not exist or is not a workflow run.
            InvalidField: The workflow has no such node.
        """
        run = await self.named(caller, run_id)
        graph = await self._graphs.of(caller.store_id, wire.WORKFLOW.read(run.workflow))
        names = sorted({step.node.event or "" for step in graph.steps if isinstance(step.node, WaitNode)} - {""})
        if name not in names:
            known = f"it is waiting for {', '.join(names)}" if names else "it is not waiting for any event"
            raise InvalidField(f"name: no node of the workflow is waiting for {name!r:.130}; {known}", field="name")

    async def awaits(self, caller: Principal, run_id: RunId, name: str) -> bool:
        """Return whether a node of a run is waiting for an event."""
        found = await self.run(caller, run_id)
        waits = (found.graph.steps[number] for number, record in found.cursor.nodes.items() if record.is_open)
        return any(
            isinstance(step.node, WaitNode) and name in {step.node.event, event_of_token(step.path)} for step in waits
        )

    async def of_token(self, caller: Principal, token: str) -> tuple[Principal, RunId, str]:
        """Return the user and the run in the caller's store to which this token belongs, and the token's event.

        Raises:
            CompletionNotFound: No run in the store has this token.
            CallNotPending: The token's node has already ended, and an event with this token was not the reason.
        """
        run_id, _, rest = token[:_TOKEN_CHARACTERS_MAX].partition(".")
        node = rest.partition(".")[0]
        try:
            run = (await self._ledger.get_run_as_service(caller, RunId(check_id(run_id, "token")))).run
        except (InvalidId, RunNotFound):
            raise CompletionNotFound from None
        key = run.workflow.token_key
        if not key or not hmac.compare_digest(token.encode(), wait_token(key, RunId(run_id), node).encode()):
            raise CompletionNotFound
        user = replace(caller, user_id=UserId(run.user_id))
        found = await self.run(user, RunId(run_id))
        record = found.cursor.nodes.get(found.step(node).number)
        name = event_of_token(node)
        if record is not None and record.state in ENDED_NODES and await self._event(user, found, record) != name:
            raise CallNotPending(f"node {node} has already ended, and an event with this token was not the reason")
        return user, RunId(run_id), name

    async def _event(self, caller: Principal, found: WorkflowRun, record: NodeRecord) -> str:
        """Return the name of the event that ended a wait of this run, or an empty string if no event did."""
        if not record.event or record.origin:
            return ""
        call_id = cursors.event_call_id(RunId(found.run.run_id), record.event)
        name: str = msgspec.json.decode((await self._ledger.get_call(caller, call_id)).arguments_json)["name"]
        return name

    async def run(self, caller: Principal, run_id: RunId) -> WorkflowRun:
        """Return one of the caller's workflow runs.

        Raises:
            RunNotFound: The run does not exist or is not a workflow run.
        """
        run = await self.named(caller, run_id)
        pinned = wire.WORKFLOW.read(run.workflow)
        graph = await self._graphs.of(caller.store_id, pinned)
        read = await self._ledger.get_run_as_service(caller, run_id, with_loop_state=True)
        cursor: object = loop_state.read(read.loop_state).cursor
        if not isinstance(cursor, WorkflowCursor):
            # The run has not started.
            cursor = msgspec.json.decode(pinned.start_state or b'{"program": "workflow"}', type=WorkflowCursor)
        return WorkflowRun(run, graph, cursor)

    async def get(self, caller: Principal, run_id: RunId, node: str) -> pb.GetExecutionResponse:
        """Return the nodes of a workflow run. With `node`, return only this node, with its input and output.

        Raises:
            RunNotFound, NodeNotFound
        """
        found = await self.run(caller, run_id)
        execution, edges = Execution(wire.RUN.read(found.run), found.graph, found.cursor), list[WorkflowEdge]()
        if node:
            nodes = [await self._node(caller, execution, found.step(node))]
        else:
            execution.add_calls(await self._calls(caller, execution.last_calls))
            nodes = execution.tree()
            await self._count_items(caller, execution, nodes)
            if found.graph.mapping is None:
                edges = [WorkflowEdge(**edge._asdict()) for edge in edges_of(incoming(found.graph.definition))]
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
            edges=edges,
        )

    async def _node(self, caller: Principal, execution: Execution, step: Step) -> NodeExecution:
        execution.add_calls(await self._calls(caller, execution.calls_of(step)))
        message = execution.node(step)
        # A map's call has only the items of one child run.
        if message.call_id and not message.HasField("map"):
            message.input_json = (await self._ledger.get_call(caller, CallId(message.call_id))).arguments_json
        while True:
            try:
                message.output_json = execution.output(step)
                return message
            except CallsNeeded as error:
                sizes = await self._calls(caller, error.call_ids, result_bytes_max=0)
                message.output_omitted_bytes = sum(call.result_omitted_bytes for call in sizes)
                if message.output_omitted_bytes > _OUTPUT_BYTES_MAX:
                    return message
                read = await self._calls(caller, error.call_ids, result_bytes_max=_OUTPUT_BYTES_MAX)
                if len(read) < len(error.call_ids):
                    raise CallNotFound from None
                execution.add_calls(read)
                message.output_omitted_bytes = 0

    async def _calls(
        self, caller: Principal, call_ids: Collection[CallId], *, result_bytes_max: int = _SHOWN_BYTES_MAX
    ) -> list[call_pb2.Call]:
        """Return the calls that exist, without results over `result_bytes_max`."""
        return await self._ledger.get_calls(caller, call_ids, result_bytes_max=result_bytes_max) if call_ids else []

    async def _count_items(self, caller: Principal, execution: Execution, nodes: Iterable[NodeExecution]) -> None:
        """Count the items that have succeeded in the open child runs of maps."""
        for node in nodes:
            await self._count_items(caller, execution, node.nodes)
            for run_id in execution.open_runs(node.path) if node.map.running else ():
                child = await self._ledger.get_run(caller, run_id)
                counts = {each.state: each.count for each in child.call_counts}
                done = min(node.map.running, counts.get(call_pb2.CALL_STATE_SUCCEEDED, 0))
                node.map.succeeded, node.map.running = node.map.succeeded + done, node.map.running - done

    async def rerun(self, caller: Principal, run_id: RunId, node: str) -> tuple[WorkflowRun, Rerun]:
        """Return a run that has ended, and what would run again if it were restarted from a node.

        Raises:
            RunNotFound, NodeNotFound
            RunNotEnded: The run, or an undo of its effects, has not ended.
            InvalidField: The run processes items of a map for another run.
        """
        found = await self.run(caller, run_id)
        if found.run.state not in ENDED:
            raise RunNotEnded("the run has not ended: wait for it to finish, or cancel it first")
        if found.run.workflow.HasField("chunk"):
            problem = f"run_id: the run is part of run {found.run.parent_run_id}: rerun that run instead"
            raise InvalidField(problem, field="run_id")
        number = found.step(node).number
        undone = await self._undone(caller, found)
        return found, reruns.rerun(found.graph, found.cursor, run_id, number, undone)

    async def _undone(self, caller: Principal, found: WorkflowRun) -> set[int]:
        """Return the nodes of a run, including reused ones, with effects that were undone."""
        cursor, own, undone = found.cursor, RunId(found.run.run_id), set[int]()
        for run_id in (own, *cursor.origins):
            for source in await sources(self._ledger.channel, caller.store_id, caller.user_id, run_id):
                parsed = cursors.parsed(source.top_call_id)
                record = None if parsed is None else cursor.nodes.get(parsed[0])
                if parsed is None or record is None or cursor.run_id(record, own) != run_id:
                    continue
                outcome = undo.outcome_of(source)
                if outcome.state in {UndoState.RUNNING, UndoState.NEEDS_APPROVAL}:
                    undo_run_id = outcome.undo_run_id
                    raise RunNotEnded(
                        f"run {undo_run_id} is still undoing effects: wait for it to finish, or cancel it first"
                    )
                if outcome.state is UndoState.ALREADY_UNDONE:
                    undone.add(parsed[0])
        return undone

    async def effects(self, caller: Principal, found: WorkflowRun, again: frozenset[int]) -> list[call_pb2.Call]:
        """Return calls that had or may have had effects, made by these nodes or by the runs below them."""
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
