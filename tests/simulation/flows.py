"""A user with workflow runs in some seeds, and the checkers of their nodes and ends."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec

from pawl.agent.v1.types_pb2 import CallDecision
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules import loop_state
from pawl.agent_loop.loop.rules.run import PinnedWorkflow, RunOptions
from pawl.agent_loop.workflows import cursor as cursors
from pawl.agent_loop.workflows.cursor import WorkflowCursor
from pawl.chassis.ids import RequestId, RunId, StoreId
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.values import ENDED
from tests.simulation.chance import Chance
from tests.simulation.cluster import LIMITS, WORKFLOWS
from tests.simulation.record import Ledger, Record, broken, call_state, run_state
from tests.simulation.world import Member, World

_PLAYED = 0.35
_SETTLING_SECONDS = 600.0
DESIGNER = "designer"


def _tool(name: str, arguments: Any = None, **more: Any) -> dict[str, Any]:
    return {"kind": "tool", "tool": name, "arguments": arguments or {}, **more}


_CHAIN = {
    "first": _tool("look", retry={"attempts": 3, "delay_seconds": 1}),
    "same": {"kind": "condition", "if": "${nodes.first.output == 'done'}", "then": ["pay"], "else": ["book"]},
    "pay": _tool("pay", {"n": 1}, retry={"attempts": 2, "delay_seconds": 1}, on_error="continue"),
    "book": _tool("book", {"n": 2}, on_error="undo"),
    "last": _tool("note", after=["pay", "book"]),
    "answer": {
        "kind": "output",
        "after": ["last"],
        "value": {"pay": "${nodes.pay.state}", "by": "${nodes.first.output}"},
    },
}
_FAN = {
    "some": {
        "kind": "parallel",
        "require": 2,
        "on_error": "continue",
        "branches": {
            "note": _tool("note"),
            "pay": _tool("pay"),
            "ask": {"kind": "human", "question": "Which colour?", "deadline_seconds": 60, "default": "none"},
            "agent": {"kind": "agent", "task": "plan-flow please", "tools": ["look", "note"]},
        },
    },
    "again": _tool(
        "look", after=["some"], repeat={"until": "${output == 'done again'}", "max": 4}, on_error="continue"
    ),
    "answer": {"kind": "output", "value": "${nodes.again.state}"},
}
_BATCH = {
    "each": {
        "kind": "map",
        "items": "${input.items}",
        "concurrency": 6,
        "tolerate": "50%",
        "do": _tool("pay", {"n": "${item}"}),
    },
    "answer": {"kind": "output", "value": "${size(nodes.each.output)}"},
}
_NESTED = {
    "sub": {"kind": "workflow", "workflow": "chain", "on_error": "continue"},
    "pause": {"kind": "wait", "seconds": 3},
    "paid": {"kind": "wait", "event": "paid", "timeout_seconds": 20, "on_error": "continue"},
    "answer": {"kind": "output", "after": ["pause", "paid"], "value": "${nodes.sub.state}"},
}
FLOWS: dict[str, dict[str, Any]] = {"chain": _CHAIN, "fan": _FAN, "batch": _BATCH, "nested": _NESTED}
for _name, _nodes in FLOWS.items():
    WORKFLOWS.save(_name, _nodes)


def are_played(chance: Chance) -> bool:
    return chance.stream("flows").random() < _PLAYED


class Designer(Member):
    """A user who starts workflow runs, answers their questions, and pauses, resumes and cancels some of them."""

    def __init__(self, world: World, store_id: StoreId) -> None:
        super().__init__(world, store_id, DESIGNER)
        self._count = 0

    async def live(self) -> None:
        started = [await self._start(number) for number in range(self._draw.choice([1, 2, 3]))]
        opened = [run_id for run_id in started if run_id]
        while opened and self._has_time():
            await asyncio.sleep(1.0 + 3.0 * self._draw.random())
            run_id = self._draw.choice(opened)
            run = await self._read(run_id)
            if run is None or run.state in ENDED:
                opened.remove(run_id)
            else:
                await self._tend(run_id, run)

    def _has_time(self) -> bool:
        """Return whether the runs may still end. A run that never ends must not keep the simulation from ending."""
        end = 1000.0 + _SETTLING_SECONDS + self._world.history.set_back_seconds
        return asyncio.get_running_loop().time() < end

    async def _read(self, run_id: RunId) -> Any:
        return await self._ask("get", lambda agent: agent.ledger.get_run(self._caller, run_id))

    async def _start(self, number: int) -> RunId:
        name = self._draw.choice(list(FLOWS))
        items = list(range(self._draw.choice([2, 7, 53])))
        pinned = PinnedWorkflow(name=name, version=1, input_json=json.dumps({"items": items}).encode())
        request = ledger_pb2.SubmitMessageRequest(
            store_id=self._store_id,
            user_id=self._caller.user_id,
            request_id=f"flow-{number}",
            text=f"[Workflow {name}]",
            options=wire.OPTIONS.fields(RunOptions(limits=LIMITS)),
            policy=ledger_pb2.MESSAGE_POLICY_QUEUE,
            user_roles=["member"],
            workflow=wire.WORKFLOW.write(pinned),
        )
        sent = await self._ask("start", lambda agent: agent.ledger.submit_message(request))
        return RunId(sent.run.run_id if sent is not None else "")

    async def _tend(self, run_id: RunId, run: run_pb2.Run) -> None:
        calm, chance = self._world.chance.calm, self._draw.random()
        for call in run.pending_calls:
            if call.state == call_pb2.CALL_STATE_ASKED and (calm or self._draw.random() < 0.5):
                await self._answer(call)
        is_paused = run_pb2.WAIT_KIND_PAUSED in run.waits
        if is_paused or (not calm and chance < 0.1):
            await self._send(run_id, pause=ledger_pb2.PauseCommand(resumes=is_paused))
        elif chance < 0.4:
            await self._send(run_id, event=ledger_pb2.EventCommand(name="paid", payload_json=b'"now"'))
        elif not calm and chance < 0.45:
            await self._cancel(run_id)

    async def _answer(self, call: call_pb2.Call) -> None:
        self._count += 1
        request_id = RequestId(f"answer-{self._count}")
        decision = CallDecision(
            run_id=call.run_id, call_id=call.call_id, kind=call_pb2.DECISION_KIND_ANSWER, answer="blue"
        )
        await self._ask("answer", lambda agent: agent.clients.inbox.decide(self._caller, request_id, decision))

    async def _send(self, run_id: RunId, **kind: Any) -> None:
        self._count += 1
        command = ledger_pb2.Command(command_id=f"flow-{self._count}", **kind)
        await self._ask("send", lambda agent: agent.ledger.send_command(self._caller, run_id, command))


def nodes_that_succeeded_never_run_again(record: Ledger) -> Iterator[str]:
    """A node makes no further call once a call of the same iteration has succeeded."""
    for run_id, calls in _flows(record).items():
        made: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
        for call_id, call in calls.items():
            if (found := cursors.parsed(call_id)) is not None:
                number, key = found
                made[number, key.iteration].append((key.chunk, key.attempt, call_state(call.state)))
        yield from (
            f"node {node} of run {run_id} ran again after attempt {attempt} succeeded"
            for node, places in made.items()
            for chunk, attempt, state in places
            if state == "SUCCEEDED" and any(each[0] == chunk and each[1] > attempt for each in places)
        )


def effects_of_nodes_happen_once(record: Record) -> Iterator[str]:
    """Each call of a node has at most one effect, unless its tool is idempotent or an operator ran the call again."""
    effects = Counter(effect.call_id for effect in record.history.effects)
    again = Counter(sent.call_id for sent in record.taken("RUN_AGAIN"))
    return (
        f"call {call_id} of run {run_id} had {effects[call_id]} effects"
        for run_id, calls in _flows(record).items()
        for call_id, call in calls.items()
        if call.tool_name in {"pay", "book"} and effects[call_id] > 1 + again[call_id]
    )


def workflow_runs_end_as_their_nodes(record: Record) -> Iterator[str]:
    """A workflow run is COMPLETED only after all its nodes have ended, and has its output node's value."""
    completed = (record.runs[run_id] for run_id in _flows(record))
    for run in (run for run in completed if run_state(run.state) == "COMPLETED"):
        (key,) = [key for key in record.tables.runs if key.run_id == run.run_id]
        cursor = loop_state.read(record.tables.loop_states.get(key, b"")).cursor
        is_open = not isinstance(cursor, WorkflowCursor) or any(each.is_open for each in cursor.nodes.values())
        has_none = run.workflow.name in FLOWS and not run.output_json
        yield from broken(
            (is_open, f"run {run.run_id} is COMPLETED with open nodes"),
            (has_none, f"run {run.run_id} is COMPLETED without its output"),
        )


def batches_process_each_item_once(record: Ledger) -> Iterator[str]:
    """A map that succeeds has the outputs of all items, and each item was paid at most once."""
    for run in map(record.runs.__getitem__, _flows(record)):
        is_whole = run.workflow.name == "batch" and not run.workflow.HasField("chunk")
        if is_whole and run_state(run.state) == "COMPLETED":
            items = len(json.loads(run.workflow.input_json)["items"])
            if msgspec.json.decode(run.output_json) != items:
                yield f"run {run.run_id} has {run.output_json!r} outputs of {items} items"


def _flows(record: Ledger) -> dict[str, dict[str, call_pb2.Call]]:
    found: dict[str, dict[str, call_pb2.Call]] = {
        run_id: {} for run_id, run in record.runs.items() if run.HasField("workflow")
    }
    for call_id, call in record.calls.items():
        if call.run_id in found:
            found[call.run_id][call_id] = call
    return found


LEDGER_CHECKERS = (
    nodes_that_succeeded_never_run_again,
    batches_process_each_item_once,
)

CHECKERS = (
    effects_of_nodes_happen_once,
    workflow_runs_end_as_their_nodes,
    *LEDGER_CHECKERS,
)
