"""One agent loop without processes: the real drive and worker, with fakes of their dependencies.

The in-memory ledger and its agents are job-store's rules over the rows of the simulation.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any
from unittest.mock import AsyncMock

from msgspec.structs import replace

from pawl.agent_loop.agents.agents import AgentLedger
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.drive import Drive, DriveEnd
from pawl.agent_loop.loop.ledger import WorkerLedgerClient
from pawl.agent_loop.loop.ports import Claim, ModelTiming
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.fact import CommandKind, Decide, ToolResult
from pawl.agent_loop.loop.rules.message import Message
from pawl.agent_loop.loop.rules.run import Goal, PinnedAgent, PinnedWorkflow, Run, RunFailure, RunOptions, Undo
from pawl.agent_loop.loop.rules.tool import Tool, Verdict
from pawl.agent_loop.loop.run_tasks import WorkerDependencies
from pawl.agent_loop.loop.worker import Worker, WorkerLimits
from pawl.agent_loop.workflows.reading import Graphs
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, CallKey, CredentialId, IdSource, RunKey, StoreId, UserId, WorkerId
from pawl.errors import LeaseLost, RunEnded
from pawl.event.v1 import event_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store import wiring
from pawl.job_store.agents.rpc import AgentLedgerServicer, AgentServicer, daily_tokens_max
from pawl.job_store.agents.rules import AGENT, SaveDraft
from pawl.job_store.agents.store import PostgresAgents
from pawl.job_store.ledger.cache import RunCache
from pawl.job_store.ledger.ports import Announcer, Limits
from pawl.job_store.ledger.reading import Page
from pawl.job_store.ledger.rpc import messages, operations
from pawl.job_store.ledger.rpc.budgets import Budgets
from pawl.job_store.ledger.rules.rows import ConversationKey, RunRow
from pawl.job_store.ledger.rules.slots import SlotLimits
from pawl.job_store.ledger.rules.submit import Submitted
from pawl.job_store.ledger.store.usage import PostgresTokens
from pawl.job_store.versions.rules import DefinitionRow, Kind, Save, VersionRow
from pawl.job_store.versions.store import PostgresVersions
from pawl.job_store.workflows.rpc import WORKFLOW, WorkflowLedgerServicer, WorkflowServicer
from pawl.values import ENDED, CallState, CommandOutcome, DecisionKind, Usage, WaitKind
from tests.fakes.manual_clock import VirtualClock
from tests.fakes.model import FakeModel, Script
from tests.fakes.registry import FakeRegistry
from tests.fakes.workflows import MemoryWorkflows
from tests.simulation.chance import Chance
from tests.simulation.history import History
from tests.simulation.job_store import Channel, answer, ports_on
from tests.simulation.store import Database, MemoryJournal, Tables

TIME = datetime(2026, 1, 1, tzinfo=UTC)


class MemoryVersions(PostgresVersions):
    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.definitions: dict[tuple[StoreId, str], DefinitionRow] = {}
        self.rows: dict[tuple[StoreId, str, int], VersionRow] = {}

    def of_store(self, store_id: StoreId) -> dict[str, DefinitionRow]:
        return {key[1]: row for key, row in self.definitions.items() if key[0] == store_id}

    async def put(
        self, store_id: StoreId, name: str, uses: tuple[str, ...], save: Save, *, validate_only: bool
    ) -> tuple[VersionRow, bool]:
        known = self.of_store(store_id)
        newest = self.rows[store_id, name, known[name].version] if name in known else None
        kept = save(known, newest, TIME)
        if kept is newest:
            return kept, False
        if not validate_only:
            self.rows[store_id, name, kept.version] = kept
            self.definitions[store_id, name] = DefinitionRow(name=name, version=kept.version, uses=uses)
        return kept, True

    async def get(self, store_id: StoreId, name: str, version: int) -> VersionRow | None:
        found = self.definitions.get((store_id, name))
        if not version and (found is None or found.is_deleted):
            return None
        return self.rows.get((store_id, name, version or (found.version if found else 0)))

    async def list(self, store_id: StoreId, *, after: str, rows_max: int) -> Page[VersionRow]:
        live = sorted(row.name for row in self.of_store(store_id).values() if row.name > after and not row.is_deleted)
        rows = [self.rows[store_id, name, self.definitions[store_id, name].version] for name in live]
        return Page(rows=rows[:rows_max], has_more=len(rows) > rows_max)

    async def versions(self, store_id: StoreId, name: str, *, before: int, rows_max: int) -> Page[VersionRow]:
        found = [row for key, row in self.rows.items() if key[:2] == (store_id, name) and row.version < before]
        found.sort(key=lambda row: -row.version)
        return Page(rows=found[:rows_max], has_more=len(found) > rows_max)

    async def delete(self, store_id: StoreId, name: str, user_id: UserId, credential_id: CredentialId) -> bool:
        found = self.definitions.get((store_id, name))
        if found is None or found.is_deleted:
            return False
        self.definitions[store_id, name] = replace(found, is_deleted=True)
        return True


class MemoryAgentRepository(MemoryVersions, PostgresAgents):
    def __init__(self) -> None:
        super().__init__(AGENT)
        self.drafts: dict[tuple[StoreId, UserId], dict[str, VersionRow]] = {}

    async def put_draft(
        self, store_id: StoreId, user_id: UserId, save: SaveDraft, *, validate_only: bool
    ) -> tuple[VersionRow, bool]:
        drafts = self.drafts.setdefault((store_id, user_id), {})
        kept = save(self.of_store(store_id), drafts, TIME)
        if kept is drafts.get(kept.name):
            return kept, False
        if not validate_only:
            drafts[kept.name] = kept
        return kept, True

    async def get_draft(self, store_id: StoreId, user_id: UserId, name: str) -> VersionRow | None:
        return self.drafts.get((store_id, user_id), {}).get(name)

    async def list_drafts(self, store_id: StoreId, user_id: UserId, *, after: str, rows_max: int) -> Page[VersionRow]:
        drafts = self.drafts.get((store_id, user_id), {})
        rows = [drafts[name] for name in sorted(drafts) if name > after]
        return Page(rows=rows[:rows_max], has_more=len(rows) > rows_max)

    async def delete_draft(self, store_id: StoreId, user_id: UserId, name: str) -> bool:
        return self.drafts.get((store_id, user_id), {}).pop(name, None) is not None


class MemoryUsage(PostgresTokens):
    def __init__(self) -> None:
        self.tokens_today: dict[tuple[StoreId, str], int] = {}
        self.day_end_time = TIME

    async def today(self, store_id: StoreId, name: str, connection: object = None) -> tuple[int, datetime]:
        return self.tokens_today.get((store_id, name), 0), self.day_end_time

    async def tokens(
        self, store_id: StoreId, user_id: UserId, connection: object = None
    ) -> Mapping[WaitKind, tuple[int, datetime]]:
        return {kind: (self.tokens_today.get((store_id, ""), 0), self.day_end_time) for kind in WaitKind}


def workflow_servicers() -> tuple[object, ...]:
    workflows = MemoryVersions(WORKFLOW)
    return WorkflowServicer(workflows), WorkflowLedgerServicer(workflows)


class MemoryAgents(AgentLedger):
    def __init__(self) -> None:
        self.repository = MemoryAgentRepository()
        self.usage = MemoryUsage()
        # Handles forwarded calls
        self.forwarded = AgentServicer(self.repository)
        self.limits = Limits(slots=SlotLimits(per_store=1000, per_user=1000))
        budgets = Budgets(self.usage, lambda _: self.limits, partial(daily_tokens_max, self.repository))
        servicer = AgentLedgerServicer(self.repository, budgets, lambda _: self.limits)
        channel: Any = Channel(lambda method, request, _: answer([servicer], method, request))
        super().__init__(channel)


LEASE_SECONDS = 10.0


@dataclass
class CountingMeter:
    left: list[str] = field(default_factory=list)
    executed: list[str] = field(default_factory=list)
    held: int = 0
    waits: list[WaitKind] = field(default_factory=list)

    def model_call_waits(self, limit: WaitKind) -> None:
        self.waits.append(limit)

    def model_called(self, store_id: StoreId, outcome: str, usage: Usage, timing: ModelTiming) -> None: ...

    def call_executed(self, outcome: str) -> None:
        self.executed.append(outcome)

    def runs_held(self, count: int) -> None:
        self.held = count

    def run_left(self, how: str) -> None:
        self.left.append(how)


class World:
    """The parts of one test. Create it inside a virtual loop."""

    def __init__(
        self, verdicts: dict[str, Verdict], scripts: list[Script], *, seconds: float = 1.0, crashes_max: int = 3
    ) -> None:
        self.clock = VirtualClock()
        self.ledger = MemoryLedger(crashes_max=crashes_max)
        self.agents = MemoryAgents()
        self.workflows = MemoryWorkflows()
        self.registry = FakeRegistry(verdicts, seconds=seconds)
        self.model = FakeModel(scripts)
        self.meter = CountingMeter()
        self.dependencies = WorkerDependencies(
            ledger=self.ledger,
            agents=self.agents,
            graphs=Graphs(self.workflows),
            registry=self.registry,
            model=self.model,
            clock=self.clock,
            ids=self.ledger.ids,
            random=lambda: 0.5,
            meter=self.meter,
            default_model="model",
        )

    async def claim(self, worker_id: str = "worker") -> Claim:
        while True:
            claims, _ = await self.ledger.claim(WorkerId(worker_id), runs_max=1, lease_seconds=LEASE_SECONDS)
            if claims:
                return next(iter(claims))
            await asyncio.sleep(1.0)

    async def drive(self, worker_id: str = "worker") -> DriveEnd:
        return await Drive(await self.claim(worker_id), self.dependencies).run()

    def worker(
        self,
        worker_id: str = "worker",
        new_drive: Callable[[Claim], Drive] | None = None,
        ending_drive: Callable[[Claim], Drive] | None = None,
        limits: WorkerLimits = WorkerLimits(),  # noqa: B008  # it is frozen
    ) -> Worker:
        def drive(claim: Claim, dependencies: WorkerDependencies, failure: RunFailure | None) -> Drive:
            own = new_drive if failure is None else ending_drive
            return own(claim) if own else Drive(claim, dependencies, failure)

        return Worker(WorkerId(worker_id), self.dependencies, limits, drive)

    async def respond(self, key: RunKey) -> None:
        for call in self.ledger.calls(key):
            commands: dict[CallState, CommandKind] = {
                CallState.AWAITING_APPROVAL: Decide(call_id=call.call_id, kind=DecisionKind.APPROVE),
                CallState.ASKED: Decide(call_id=call.call_id, kind=DecisionKind.ANSWER, answer="blue"),
                CallState.OFFERED: ToolResult(call_id=call.call_id, result=CallResult(content_json=b'"shown"')),
            }
            if call.state in commands:
                await self.ledger.send(key, commands[call.state])

    async def finish(self, key: RunKey) -> None:
        for _ in range(50):
            if self.ledger.run(key).state in ENDED:
                return
            with contextlib.suppress(LeaseLost, RunEnded):
                await self.drive()
            await self.respond(key)
        raise AssertionError(f"the run does not end: {self.ledger.run(key)}")


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
        self._journal = MemoryJournal(self._database, self.ids, RunCache(lambda: 0.0))
        self._limits = Limits(crashes_max=crashes_max, queue_max=10, store_queue_max=1000, slots=_SLOTS)
        ports = ports_on(self._database, self._limits, ids=self.ids, announcer=AsyncMock(spec=Announcer))
        self._job_store = wiring.wire(ports, lambda _: self._limits, crashes_max=crashes_max)
        self._is_open = False

    def submit(
        self,
        text: str,
        options: RunOptions | None = None,
        conversation_id: str = "",
        undo: Undo | None = None,
        agent: PinnedAgent | None = None,
        *,
        goal: Goal | None = None,
        own_tools: Sequence[Tool] = (),
        workflow: PinnedWorkflow | None = None,
        traceparent: str = "",
    ) -> RunKey:
        request = ledger_pb2.SubmitMessageRequest(
            store_id=STORE,
            user_id=USER,
            conversation_id=conversation_id,
            text=text,
            options=wire.OPTIONS.fields(options or RunOptions()),
            policy=ledger_pb2.MESSAGE_POLICY_QUEUE,
            undo=wire.UNDO.fields(undo) if undo else None,
            goal=wire.GOAL.fields(goal) if goal else None,
            agent=run_pb2.PinnedAgent(name=agent.name, version=agent.version) if agent else None,
            tools=map(wire.OWN_TOOL.write, own_tools),
            workflow=wire.WORKFLOW.write(workflow) if workflow else None,
            traceparent=traceparent,
        )
        key: RunKey = self.apply(request).run.key
        return key

    def apply(self, request: ledger_pb2.SubmitMessageRequest) -> Submitted:
        submitted: Submitted = self._apply(operations.submit(request, lambda _: self._limits))
        return submitted

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
        outcome: CommandOutcome = self._apply(operations.send(request, lambda _: self._limits)).outcome
        return outcome

    async def note_completion(self, key: RunKey, call_id: CallId) -> None:
        request = ledger_pb2.NoteCompletionRequest(store_id=key.store_id, run_id=key.run_id, call_id=call_id)
        self._apply(operations.note_completion(request))

    def time(self) -> datetime:
        return self._database.now()

    def row(self, key: RunKey) -> RunRow:
        return self.tables.runs[key]

    def run(self, key: RunKey) -> Run:
        return wire.RUN.read(messages.run(self.row(key), whole=True))

    def calls(self, key: RunKey) -> list[Call]:
        return [wire.CALL.read(messages.call(row)) for row in self.tables.calls_of(key)]

    def messages(self, key: RunKey) -> list[Message]:
        rows = self.tables.messages[ConversationKey(key.store_id, self.row(key).conversation_id)]
        return [wire.MESSAGE.read(messages.message(row, self.row(key).user_id)) for row in rows]

    def log(self, key: RunKey) -> list[event_pb2.RunEvent]:
        return [event_pb2.RunEvent.FromString(event) for event in self.tables.events[key]]

    def events(self, key: RunKey) -> list[Any]:
        """Return the log, with the owner's events as values and the ledger's own events unchanged."""
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
