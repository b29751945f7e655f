"""Users: they send messages, handle pending calls, change their minds, repeat requests and touch other users' runs."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from google.protobuf.message import Message

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2
from pawl.event.v1 import run_pb2
from tests.chaos.caller import Caller, settled
from tests.chaos.desk import Desk
from tests.chaos.effects import EffectFile
from tests.chaos.front_ends import FrontEnd
from tests.chaos.history import Kind, Operation
from tests.chaos.prompts import prompt
from tests.simulation.record import run_state
from tests.simulation.reference import ENDED

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
        kind = self._draw.choices((Kind.START, Kind.SEND, Kind.STEER, Kind.INTERRUPT), (60, 16, 12, 12))[0]
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
        """Find runs that no message started: jobs and their notification turns."""
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
