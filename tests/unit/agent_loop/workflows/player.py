"""Plays a workflow run with the loop's pure rules: plans, commits, facts and commands, and crashes between any two."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any, Final

from msgspec.structs import replace

from pawl.agent_loop.loop.rules import loop_state, planning, step
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.decision import (
    Execute,
    Finish,
    Propose,
    ReadAgent,
    ReadCalls,
    ReadProgram,
    StopCalls,
    Wait,
)
from pawl.agent_loop.loop.rules.fact import (
    AgentEnded,
    AgentRead,
    CallChecked,
    CallExecuted,
    CallsRead,
    CallStopped,
    Command,
    CommandKind,
    Decide,
    Event,
    Fact,
    ProgramRead,
)
from pawl.agent_loop.loop.rules.run import FailureClass, PinnedTool, PinnedWorkflow, Run, RunFailure
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.loop.rules.tool import ExecutionResult, Stopped
from pawl.agent_loop.workflows import cursor as cursors
from pawl.agent_loop.workflows import definition as definitions
from pawl.agent_loop.workflows import graph, parsing
from pawl.agent_loop.workflows.cursor import NodeState, WorkflowCursor
from pawl.agent_loop.workflows.values import state_name
from pawl.chassis.ids import CallId, CommandId, ConversationId, RunId, StoreId, UserId
from pawl.values import ENDED, CallState, DecisionKind, EffectClass, Outcome, RunState
from tests.fakes.registry import tool
from tests.unit.agent_loop.workflows import reference

_VERDICT: Final = tool(effect=EffectClass.READ_ONLY)


class Player:
    """One run. `chance` decides the order of its work, and when its worker crashes."""

    def __init__(self, document: dict[str, Any], given: Any, chance: random.Random, *, crashes: int) -> None:
        self.graph = graph.of_definition(definitions.decode(definitions.encode(parsing.read(document))))
        self._chance, self._crashes = chance, crashes
        self._now = 1000.0
        self._facts: list[Fact] = []
        self._commands = 0
        # All calls in the ledger. A claim loads only the open ones.
        self.calls: dict[CallId, Call] = {}
        # How often each call succeeded.
        self.succeeded: Counter[CallId] = Counter()
        pinned = PinnedWorkflow(name="random", version=1, input_json=json.dumps(given).encode())
        run = Run(
            store_id=StoreId("s"),
            user_id=UserId("u"),
            conversation_id=ConversationId("c"),
            run_id=RunId("run_1"),
            workflow=pinned,
        )
        self.state = State(run=run)
        self.settle()

    @property
    def cursor(self) -> WorkflowCursor:
        cursor = self.state.loop.cursor
        assert isinstance(cursor, WorkflowCursor)
        return cursor

    @property
    def states(self) -> dict[str, str]:
        records = {step.path: self.cursor.nodes.get(step.number) for step in self.graph.steps}
        return {path: state_name(record) for path, record in records.items()}

    @property
    def open(self) -> set[str]:
        """Paths of the nodes in progress, except parallel nodes."""
        nodes = self.cursor.nodes
        return {each.path for each in self.graph.steps if not each.branches and _is_open(nodes.get(each.number))}

    def end(self, path: str, outcome: reference.Outcome) -> None:
        """End the open call of a node, or its wait."""
        found = self.graph.step(path)
        assert found is not None
        ok = isinstance(outcome, reference.Succeeded)
        encoded = json.dumps(outcome.output if isinstance(outcome, reference.Succeeded) else None).encode()
        kind = type(found.node).__struct_config__.tag
        if kind == "wait":
            self._send(Event(name=str(getattr(found.node, "event", "")), payload_json=encoded))
            return
        call = next(each for each in self.state.open_calls if cursors.parsed(each.call_id) == self._key(found))
        self.succeeded[call.call_id] += ok
        reason = outcome.reason if isinstance(outcome, reference.Failed) else ""
        match kind:
            case "tool":
                result = CallResult(content_json=encoded, is_error=not ok, error_reason=reason)
                ended = ExecutionResult(outcome=Outcome.SUCCEEDED if ok else Outcome.FAILED, result=result)
                self._facts.append(CallExecuted(call_id=call.call_id, ended=ended))
            case "human":
                answer = json.loads(encoded) if ok else ""
                decided = DecisionKind.ANSWER if ok else DecisionKind.REJECT
                self._send(Decide(call_id=call.call_id, kind=decided, answer=answer))
            case _:
                if kind == "map":
                    encoded = b'{"failed":0,"outputs":%s}' % encoded
                child = replace(
                    self.state.run,
                    state=RunState.COMPLETED if ok else RunState.FAILED,
                    output_json=encoded if kind != "agent" else b"",
                    output_text=json.loads(encoded) if kind == "agent" and ok else "",
                    failure=None if ok else RunFailure(failure_class=FailureClass.TOOL, reason=reason, message="no"),
                )
                self._send(AgentEnded(call_id=call.call_id, run=child))

    def end_chunk(self, number: int, **output: Any) -> None:
        """End the call of a chunk of the only map."""
        call = next(each for each in self.state.open_calls if each.call_id.endswith(f"_1_1_{number}"))
        child = replace(self.state.run, state=RunState.COMPLETED, output_json=json.dumps(output).encode())
        self._send(AgentEnded(call_id=call.call_id, run=child))
        self.settle()

    def settle(self) -> None:
        """Plan, commit and work until only `end` can change anything."""
        for _ in range(500):
            if self._crashes and self._chance.randrange(4) == 0:
                self._crashes -= 1
                self._crash()
            self._now += 0.01
            facts = self._taken()
            plan = planning.plan(self.state, facts, self._now)
            if self._crashes and self._chance.randrange(6) == 0:
                # The worker dies before the step is written. The registry repeats the results of executed calls.
                self._crashes -= 1
                self._facts += [fact for fact in facts if isinstance(fact, CallExecuted)]
                self._crash()
                continue
            self.calls.update(plan.state.calls)
            self.state = step.committed(plan.state, 0, None)
            for work in plan.work:
                self._facts += self._done(work)
            is_due = isinstance(plan.rest, Wait) and plan.rest.until is not None and plan.rest.until <= self._now
            has_news = bool(self._facts or self.state.commands or plan.work)
            if not has_news and self._end_running_calls():
                continue
            undo_call = self.state.calls.get(cursors.undo_call_id(self.state.run.run_id))
            if not has_news and undo_call is not None and not undo_call.settled:
                self._send(AgentEnded(call_id=undo_call.call_id, run=replace(self.state.run, state=RunState.COMPLETED)))
                continue
            if isinstance(plan.rest, Finish) or not (is_due or has_news):
                return
        raise AssertionError("the run does not settle")

    def _end_running_calls(self) -> bool:
        """End the running calls that a failing run waits for. Return whether there were any."""
        cursor = self.state.loop.cursor
        if not isinstance(cursor, WorkflowCursor) or cursor.failure is None:
            return False
        running = [call for call in self.state.open_calls if call.state is CallState.RUNNING]
        ended = ExecutionResult(outcome=Outcome.SUCCEEDED, result=CallResult(content_json=b"null"))
        self._facts += [CallExecuted(call_id=call.call_id, ended=ended) for call in running]
        return bool(running)

    def _taken(self) -> list[Fact]:
        self._chance.shuffle(self._facts)
        count = self._chance.randint(0, len(self._facts)) if len(self._facts) > 1 else len(self._facts)
        taken, self._facts = self._facts[:count], self._facts[count:]
        in_work = {fact.call.call_id for fact in self._facts if isinstance(fact, CallChecked)}
        is_reading = any(isinstance(fact, CallsRead) for fact in self._facts)
        under_way = {f"check:{each}" for each in in_work} | ({"read"} if is_reading else set())
        running = {call.call_id for call in self.state.open_calls if call.state is CallState.RUNNING}
        ended = {fact.call_id for fact in taken if isinstance(fact, CallExecuted)}
        self.state = replace(self.state, under_way=frozenset(under_way | (running - ended)))
        return taken

    def _crash(self) -> None:
        """Load the run anew: its row, its open calls and its loop state."""
        loop = loop_state.read(loop_state.write(self.state.loop))
        opened = {call.call_id: call for call in self.state.open_calls}
        self.state = State(run=self.state.run, calls=opened, loop=loop, commands=self.state.commands)
        self._facts = [fact for fact in self._facts if isinstance(fact, CallExecuted)]

    def _done(self, work: object) -> list[Fact]:
        match work:
            case ReadProgram():
                return [ProgramRead(graph=self.graph, tools=(PinnedTool(name="look", version=1),))]
            case ReadCalls():
                return [CallsRead(calls=tuple(self.calls[call_id] for call_id in work.call_ids))]
            case ReadAgent():
                return [AgentRead(call_id=work.call_id, workflow_version=1)]
            case Propose():
                return [CallChecked(call=call, verdict=self._verdict(call)) for call in work.calls]
            case StopCalls():
                return [CallStopped(call_id=call_id, answer=Stopped(stopped=True)) for call_id in work.call_ids]
            case Execute():
                return []
            case _:
                raise TypeError(work)

    def _verdict(self, call: Call) -> Any:
        return replace(_VERDICT, call_id=call.call_id, arguments_json=call.proposed_arguments.encode())

    def _send(self, kind: CommandKind) -> None:
        self._commands += 1
        command = Command(command_id=CommandId(f"cmd_{self._commands}"), time=self._now, kind=kind, user_id=UserId("u"))
        self.state = replace(self.state, commands=(*self.state.commands, command))

    def _key(self, found: graph.Step) -> tuple[int, cursors.NodeKey]:
        return found.number, self.cursor.nodes[found.number].key


def _is_open(record: cursors.NodeRecord | None) -> bool:
    return record is not None and record.state in {NodeState.RUNNING, NodeState.RETRYING}


def has_ended(player: Player) -> bool:
    return player.state.run.state in ENDED
