"""Users who send messages, handle pending calls, change their minds, repeat requests and touch other users' runs.

Each user has a desk with the calls that wait for this user, and watchers that leave and return.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2, workflow_pb2
from pawl.event.v1 import call_pb2, run_pb2
from tests.chaos import prompts
from tests.chaos.caller import Caller, settled
from tests.chaos.front_ends import FrontEnd, seen
from tests.chaos.history import EffectFile, Kind, Operation
from tests.chaos.prompts import prompt
from tests.simulation.checkers import ENDED
from tests.simulation.record import call_state, run_state

_STATE = "RUN_STATE_"
_OPEN_RUNS_MAX = 5
_JOB_POLL_RATE = 0.2
_OPEN = [number for name, number in run_pb2.RunState.items() if number and name.removeprefix(_STATE) not in ENDED]
_POLICIES = {
    Kind.SEND: types_pb2.MESSAGE_POLICY_QUEUE,
    Kind.STEER: types_pb2.MESSAGE_POLICY_STEER,
    Kind.INTERRUPT: types_pb2.MESSAGE_POLICY_INTERRUPT,
}


class Person:
    """A user of a store with a front end. `open_runs` are the runs not known to have ended."""

    def __init__(self, caller: Caller, effects: EffectFile, others: list[Person], *, pace_seconds: float) -> None:
        self.caller = caller
        self.calm = False
        self.open_runs: dict[str, None] = {}
        self._front_end = FrontEnd(caller, self.open_runs)
        self._desk = Desk(caller, self._front_end, effects)
        self._draw = caller.draw
        self._others = others
        self._pace_seconds = pace_seconds
        self._ended_runs: set[str] = set()
        self._found: set[str] = set()
        self._conversations: list[str] = []

    def calm_down(self) -> None:
        """Send no more messages, and finish the open runs."""
        self.calm = True
        self._front_end.calm_down()

    async def live(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            front_end = tasks.create_task(self._front_end.live())
            bringing = tasks.create_task(self._bring_messages())
            while not (self.calm and bringing.done() and not self.open_runs and not await self._find()):
                await asyncio.sleep(0.2 + 0.4 * self._draw.random())
                if self._draw.random() < _JOB_POLL_RATE:
                    await self._find()
                await self._tend()
            front_end.cancel()

    async def _bring_messages(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while not self.calm:
                if len(self.open_runs.keys() - self._found) < _OPEN_RUNS_MAX:
                    tasks.create_task(self._bring())
                await asyncio.sleep(self._pace_seconds * (0.5 + self._draw.random()))

    async def _bring(self) -> None:
        kind = self._draw.choices((*_POLICIES, Kind.START, Kind.WORKFLOW, Kind.GOAL), (16, 12, 12, 60, 12, 8))[0]
        if kind in {Kind.WORKFLOW, Kind.GOAL}:
            await self._begin(kind)
            return
        conversation = self._draw.choice(self._conversations[-3:]) if self._conversations else ""
        kind = kind if conversation else Kind.START
        operation = self.caller.invoke(
            kind,
            self.caller.next_id("req"),
            conversation_id="" if kind is Kind.START else conversation,
            content=prompt(self._draw, self.caller.next_id("do")),
        )
        options = run_pb2.RunOptions(
            unknown_outcome_policy=self._draw.choice(run_pb2.UnknownOutcomePolicy.values()),
            batch_order=self._draw.choice(run_pb2.BatchOrder.values()),
        )
        if kind is Kind.START and self._draw.random() < 0.2:
            await settled(self._start_on_stream(operation, options))
        else:
            times = 2 if self._draw.random() < 0.2 else 1
            await settled(*(self._submit(operation, options) for _ in range(times)))

    async def _begin(self, kind: Kind) -> None:
        operation = self.caller.invoke(kind, self.caller.next_id("req"), content=self.caller.next_id("errand"))
        start = prompts.workflow if kind is Kind.WORKFLOW else prompts.goal
        method, request = f"Start{kind.title()}", start(self._draw, operation.request_id, operation.content)
        times = 2 if self._draw.random() < 0.2 else 1
        answers = await asyncio.gather(*(self.caller.ask(operation, method, request) for _ in range(times)))
        self._know((answers[0].goal.run if kind is Kind.GOAL else answers[0].run).run_id, "")

    async def _start_on_stream(self, operation: Operation, options: run_pb2.RunOptions) -> None:
        start = session_pb2.Start(text=operation.content, options=options)
        self._know((await self._front_end.ask(operation, start=start)).run_id, "")

    async def _submit(self, operation: Operation, options: run_pb2.RunOptions) -> None:
        about: dict[str, Any] = {"request_id": operation.request_id, "text": operation.content, "options": options}
        method, request = "StartRun", cast("type[Message]", agent_pb2.StartRunRequest)
        if operation.kind is not Kind.START:
            about |= {"conversation_id": operation.conversation_id, "policy": _POLICIES[operation.kind]}
            method, request = "SendMessage", agent_pb2.SendMessageRequest
        run = (await self.caller.ask(operation, method, request(**about))).run
        self._know(run.run_id, run.conversation_id)

    def _know(self, run_id: str, conversation_id: str) -> None:
        if run_id not in self._ended_runs:
            self.open_runs[run_id] = None
        if conversation_id and conversation_id not in self._conversations:
            self._conversations.append(conversation_id)

    async def _find(self) -> bool:
        """Find runs that no message started: jobs, and turns started by job notices."""
        request = agent_pb2.ListRunsRequest(page_size=200, states=_OPEN)
        listed = await self.caller.read(lambda: self.caller.send("ListRuns", request))
        new = {run.run_id for run in listed.runs} - self.open_runs.keys() - self._ended_runs
        self._found |= new
        self.open_runs.update(dict.fromkeys(new))
        return bool(new)

    async def _tend(self) -> None:
        await asyncio.gather(*(self._look(run_id) for run_id in list(self.open_runs)))

    async def _look(self, run_id: str) -> None:
        request = agent_pb2.GetRunRequest(run_id=run_id)
        run = (await self.caller.read(lambda: self.caller.send("GetRun", request))).run
        if run_state(run.state) in ENDED:
            self.open_runs.pop(run_id, None)
            self._ended_runs.add(run_id)
        if run_pb2.WAIT_KIND_EVENT in run.waits and self._draw.random() < 0.2:
            await self._desk.sign(run.run_id)
        await self._desk.see(run, calm=self.calm)
        await self._meddle(run)

    async def _meddle(self, run: run_pb2.Run) -> None:
        # A run whose workers died repeatedly is quarantined until a person acts.
        set_aside = self.calm and run_state(run.state) == "NEEDS_ATTENTION" and not run.pending_calls
        if set_aside or (not self.calm and self._draw.random() < 0.012):
            await self._desk.cancel(run.run_id)
        strangers = [person for person in self._others if person is not self and person.open_runs]
        if strangers and not self.calm and self._draw.random() < 0.01:
            victim = self._draw.choice(list(self._draw.choice(strangers).open_runs))
            await self._desk.cancel(victim, Kind.TRESPASS)


_PATIENCE_SECONDS = 8.0
_GRANTS = 0.8


class Desk:
    def __init__(self, caller: Caller, front_end: FrontEnd, effects: EffectFile) -> None:
        self._caller = caller
        self._draw = caller.draw
        self._front_end = front_end
        self._effects = effects
        self._handled: dict[tuple[str, str], float] = {}

    async def see(self, run: run_pb2.Run, *, calm: bool) -> None:
        for call in run.pending_calls:
            key, now = (call.call_id, call_state(call.state)), time.monotonic()
            handled_at = self._handled.get(key)
            is_handled = handled_at is not None and now - handled_at < _PATIENCE_SECONDS
            if is_handled or self._draw.random() < 0.3:
                continue
            self._handled[key] = now
            match call_state(call.state):
                case "AWAITING_APPROVAL" | "ASKED":
                    rivals = 2 if self._draw.random() < 0.15 else 1
                    await asyncio.gather(*(self._decide(call) for _ in range(rivals)))
                case "OFFERED" if calm or self._draw.random() < 0.15:
                    await self._return(call)
                case "RUNNING" if run_state(run.state) == "NEEDS_ATTENTION":
                    await self._resolve(call)
                case _:
                    pass

    async def sign(self, run_id: str) -> None:
        """Send the event that a run waits for, perhaps again after it was received."""
        request = workflow_pb2.SendEventRequest(run_id=run_id, name=prompts.SIGNED, event_id="sign")
        await settled(self._caller.read(lambda: self._caller.send("SendEvent", request)))

    async def cancel(self, run_id: str, kind: Kind = Kind.CANCEL) -> None:
        operation = self._caller.invoke(kind, self._caller.next_id("cancel"), run_id=run_id)
        request = agent_pb2.CancelRunRequest(request_id=operation.request_id, run_id=run_id, reason="changed my mind")
        await self._perhaps_twice(lambda: self._caller.ask(operation, "CancelRun", request))

    async def _decide(self, call: call_pb2.Call) -> None:
        operation, decision = self._answer(call) if call_state(call.state) == "ASKED" else self._verdict(call)
        if self._draw.random() < 0.2:
            await settled(self._front_end.ask(operation, decision=decision))
            return
        request = agent_pb2.DecideRequest(request_id=operation.request_id, run_id=call.run_id, decision=decision)
        await self._perhaps_twice(lambda: self._caller.ask(operation, "Decide", request))

    def _answer(self, call: call_pb2.Call) -> tuple[Operation, types_pb2.CallDecision]:
        answer = self._caller.next_id("answer")
        decision = types_pb2.CallDecision(
            run_id=call.run_id, call_id=call.call_id, kind=call_pb2.DECISION_KIND_ANSWER, answer=answer
        )
        return self._operation(Kind.ANSWER, call, answer), decision

    def _verdict(self, call: call_pb2.Call) -> tuple[Operation, types_pb2.CallDecision]:
        kind = self._draw.choices((Kind.APPROVE, Kind.EDIT, Kind.REJECT), (60, 20, 20))[0]
        arguments = json.loads(call.arguments_json)
        decision = types_pb2.CallDecision(
            run_id=call.run_id,
            call_id=call.call_id,
            kind=call_pb2.DecisionKind.Value(f"DECISION_KIND_{kind.name}"),
            digest=call.approval.digest if self._draw.random() < 0.95 else "0" * 64,
        )
        series = call.approval.series
        if kind is Kind.APPROVE and series.digest and self._draw.random() < _GRANTS:
            decision.digest, decision.for_series = series.digest, True
            content = json.dumps(arguments, sort_keys=True)
            return self._operation(kind, call, content, series=str(series.iterations_max)), decision
        if kind is Kind.EDIT:
            arguments["tag"] = self._caller.next_id("edited")
            decision.arguments_json = json.dumps(arguments).encode()
        return self._operation(kind, call, json.dumps(arguments, sort_keys=True)), decision

    async def _return(self, call: call_pb2.Call) -> None:
        """Send the result of a front-end call without a stream, perhaps while a front end does so too."""
        operation = self._operation(Kind.RESULT, call, json.dumps(self._caller.next_id("by-hand")))
        await self._perhaps_twice(lambda: self._front_end.submit(operation))

    async def _resolve(self, call: call_pb2.Call) -> None:
        """Resolve a call as an operator: check externally whether its effect happened, and report it."""
        happened = any(effect.key == call.call_id for effect in self._effects.happened())
        content = json.dumps(self._caller.next_id("found")) if happened else ""
        operation = self._operation(Kind.RESOLVE, call, content)
        request = agent_pb2.ResolveCallRequest(
            request_id=operation.request_id,
            run_id=call.run_id,
            call_id=call.call_id,
            resolution=agent_pb2.RESOLUTION_HAPPENED if happened else agent_pb2.RESOLUTION_TELL_MODEL,
            content_json=content.encode(),
        )
        await self._perhaps_twice(lambda: self._caller.ask(operation, "ResolveCall", request))

    def _operation(self, kind: Kind, call: call_pb2.Call, content: str, **about: str) -> Operation:
        about |= {"run_id": call.run_id, "call_id": call.call_id, "content": content}
        return self._caller.invoke(kind, self._caller.next_id(kind), **about)

    async def _perhaps_twice(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Send a request, sometimes twice concurrently with the same request id."""
        await settled(*(ask() for _ in range(2 if self._draw.random() < 0.15 else 1)))


class Watcher:
    def __init__(self, name: str, people: list[Person], draw: random.Random) -> None:
        self._name = name
        self._people = people
        self._draw = draw
        self._count = 0

    async def live(self) -> None:
        while True:
            person = self._draw.choice(self._people)
            if not person.open_runs:
                await asyncio.sleep(0.3)
                continue
            self._count += 1
            await self._watch(f"{self._name}-{self._count}", person.caller, self._draw.choice(list(person.open_runs)))

    async def _watch(self, watcher: str, caller: Caller, run_id: str) -> None:
        position = 0
        while True:
            pieces = self._draw.choice((1, 3, 20, 1000))
            stream = self._draw.choice(caller.stubs).WatchRun(
                agent_pb2.WatchRunRequest(run_id=run_id, after_seq=position), metadata=caller.metadata, timeout=20
            )
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for answer in stream:
                    for event in answer.events:
                        if event.seq != position + 1:
                            caller.history.complain(f"{watcher} got seq {event.seq} of {run_id} after {position}")
                        position = event.seq
                        caller.history.see(seen(watcher, event))
                    pieces -= 1
                    if pieces == 0:
                        break
                    if self._draw.random() < 0.01:
                        await asyncio.sleep(1.0)
                else:
                    return  # The server closed the stream: the run has ended.
            stream.cancel()
            await asyncio.sleep(0.05 + 0.3 * self._draw.random())
