"""The in-memory ledger as workers see it: job-store's rules over the rows of the simulation."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.ledger import WorkerLedgerClient
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.fact import CommandKind
from pawl.agent_loop.loop.rules.message import Message
from pawl.agent_loop.loop.rules.run import PinnedAgent, Run, RunOptions, Undo
from pawl.agent_loop.loop.rules.tool import Tool
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, CallKey, IdSource, RunKey
from pawl.event.v1 import event_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store import wiring
from pawl.job_store.ledger.ports import Limits
from pawl.job_store.ledger.rpc import messages, operations
from pawl.job_store.ledger.rules.rows import ConversationKey, RunRow
from pawl.job_store.ledger.rules.slots import SlotLimits
from pawl.values import CommandOutcome
from tests.fakes.virtual_time import VirtualClock
from tests.simulation.chance import Chance
from tests.simulation.history import History
from tests.simulation.job_store import Channel, answer, ports_on
from tests.simulation.store import Database, MemoryJournal, Tables

# Latency of a request and of its response, each.
_LATENCY_SECONDS = 0.001

_OF_THE_LEDGER = {
    *("run_changed", "message_added", "call_changed", "operator_acted", "run_topped_up"),
    *("starter_paused", "starter_fired"),
}

STORE, USER = "store", "user"
_SLOTS = SlotLimits(per_store=1000, per_user=1000)


class CountedIds(IdSource):
    def __init__(self) -> None:
        super().__init__(VirtualClock())
        self._numbers = itertools.count(1)

    def new(self, prefix: str) -> str:
        return f"{prefix}_{next(self._numbers):06}"


class SilentAnnouncer:
    async def publish(self, events: object) -> None: ...

    async def wake(self, wakeups: object) -> None: ...

    async def work_ready(self) -> None: ...

    async def inboxes_changed(self, inboxes: object) -> None: ...


class MemoryLedger(WorkerLedgerClient):
    """A `WorkerLedger` with methods to start runs and send commands.

    `fault` is called before and after every worker request with the method name and whether it was executed. Its
    exceptions reach the caller, so a request can be lost before or after its execution.
    """

    def __init__(self, *, crashes_max: int = 3) -> None:
        channel: Any = Channel(self._call)
        super().__init__(channel)
        self.ids = CountedIds()
        self.tables = Tables()
        self.fault: Callable[[str, bool], Awaitable[None]] | None = None
        self.steps: list[ledger_pb2.CommitRunRequest] = []
        # False: a claim does not include the loaded run
        self.loads_along = True
        self._database = Database(self.tables, Chance(0, calm=True), History(), "test")
        self._journal = MemoryJournal(self._database, self.ids)
        self._limits = Limits(crashes_max=crashes_max, queue_max=10, store_queue_max=1000, slots=_SLOTS)
        ports = ports_on(self._database, self._limits, ids=self.ids, announcer=SilentAnnouncer())
        self._job_store = wiring.wire(ports, self._limits)
        self._is_open = False

    def submit(
        self,
        text: str,
        options: RunOptions | None = None,
        conversation_id: str = "",
        undo: Undo | None = None,
        agent: PinnedAgent | None = None,
        *,
        own_tools: Sequence[Tool] = (),
    ) -> RunKey:
        request = ledger_pb2.SubmitMessageRequest(
            store_id=STORE,
            user_id=USER,
            conversation_id=conversation_id,
            text=text,
            options=wire.OPTIONS.fields(options or RunOptions()),
            policy=ledger_pb2.MESSAGE_POLICY_QUEUE,
            undo=wire.UNDO.fields(undo) if undo else None,
            agent=run_pb2.PinnedAgent(name=agent.name, version=agent.version) if agent else None,
            tools=map(wire.OWN_TOOL.write, own_tools),
        )
        submitted = self._apply(operations.submit(request, self._limits))
        key: RunKey = submitted.run.key
        return key

    async def send(self, key: RunKey, kind: CommandKind, command_id: str = "", *, approver: str = "") -> CommandOutcome:
        command = ledger_pb2.Command(command_id=command_id or self.ids.new("cmd"), **wire.KIND.fields(kind))
        call = self.tables.calls.get(CallKey(key.store_id, CallId(command.decision.call_id)))
        if call is not None:
            is_of_series = command.decision.for_series and call.series is not None
            command.decision.digest = call.series.digest if is_of_series and call.series else call.digest
        request = ledger_pb2.SendCommandRequest(
            store_id=key.store_id,
            run_id=key.run_id,
            user_id=approver or USER,
            command=command,
            as_operator=command.HasField("resolve"),
            decision_right=ledger_pb2.DECISION_RIGHT_STORE if approver else ledger_pb2.DECISION_RIGHT_UNSPECIFIED,
        )
        outcome: CommandOutcome = self._apply(operations.send(request, self._limits)).outcome
        return outcome

    async def note_completion(self, key: RunKey, call_id: CallId) -> None:
        request = ledger_pb2.NoteCompletionRequest(store_id=key.store_id, run_id=key.run_id, call_id=call_id)
        self._apply(operations.note_completion(request))

    def time(self) -> datetime:
        return self._database.now()

    def row(self, key: RunKey) -> RunRow:
        return self.tables.runs[key]

    def run(self, key: RunKey) -> Run:
        return wire.RUN.read(messages.run(self.row(key)))

    def calls(self, key: RunKey) -> list[Call]:
        return [wire.CALL.read(messages.call(row)) for row in self.tables.calls_of(key)]

    def messages(self, key: RunKey) -> list[Message]:
        rows = self.tables.messages[ConversationKey(key.store_id, self.row(key).conversation_id)]
        return [wire.MESSAGE.read(messages.message(row, self.row(key).user_id)) for row in rows]

    def log(self, key: RunKey) -> list[event_pb2.RunEvent]:
        return [event_pb2.RunEvent.FromString(event) for event in self.tables.events[key]]

    def events(self, key: RunKey) -> list[Any]:
        """Return the log: the owner's events as values, the ledger's own unchanged."""
        read = wire.EVENT.read
        return [event if event.WhichOneof("kind") in _OF_THE_LEDGER else read(event) for event in self.log(key)]

    def _apply(self, operation: Any) -> Any:
        (outcome,) = self._journal.apply([operation]).outcomes
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _call(self, method: str, request: Any, user: Principal | None = None) -> list[Any]:
        if not self._is_open:
            self._is_open = True
            await self._job_store.group_commit.__aenter__()
        await self._maybe_fail(method, done=False)
        responses = await answer(self._job_store.servicers, method, request, user)
        if method == "CommitRun":
            self.steps.append(request)
        if method == "ClaimRuns" and not self.loads_along:
            for run in (run for response in responses for run in response.runs):
                run.ClearField("loaded")
        await self._maybe_fail(method, done=True)
        return responses

    async def _maybe_fail(self, method: str, *, done: bool) -> None:
        await asyncio.sleep(_LATENCY_SECONDS)
        if self.fault is not None:
            await self.fault(method, done)


def logged_states(log: Iterable[event_pb2.RunEvent]) -> list[str]:
    states = [event.run_changed.run.state for event in log if event.HasField("run_changed")]
    return [run_pb2.RunState.Name(state).removeprefix("RUN_STATE_") for state in states]


def transient(
    error: type[Exception], *, at: Iterable[int], name: str, done: bool = False
) -> Callable[[str, bool], Awaitable[None]]:
    """Return a fault that fails the requests with this name and these indexes, counted from 0."""
    wanted, count = set(at), itertools.count()

    async def fault(request: str, carried_out: bool) -> None:
        if (request, carried_out) == (name, done) and next(count) in wanted:
            raise error

    return fault
