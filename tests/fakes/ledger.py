"""The ledger in memory: the real rules of job-store over a unit that is never stored."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from msgspec.structs import replace

from pawl.agent_loop.app.ports import Claim, Loaded, Renewal, RunKey
from pawl.agent_loop.domain import loop_state, undo
from pawl.agent_loop.domain.call import Call, CallState
from pawl.agent_loop.domain.child import Delegation
from pawl.agent_loop.domain.command import (
    AgentEnded,
    Cancel,
    Command,
    CommandKind,
    Decide,
    Resolve,
    Steer,
    ToolResult,
    TopUp,
)
from pawl.agent_loop.domain.event import OwnerEvent as DomainEvent
from pawl.agent_loop.domain.event import RoundStarted
from pawl.agent_loop.domain.message import Message, Role
from pawl.agent_loop.domain.run import Run, RunFailure, RunOptions, RunState, StopCause, Undo, Usage, WaitKind
from pawl.agent_loop.domain.step import Committed, Step
from pawl.agent_loop.domain.undo import UndoSource
from pawl.errors import CallNotFound, LeaseLost, RunNotFound
from pawl.job_store.domain import command as commands
from pawl.job_store.domain import states
from pawl.job_store.domain.attention import ReportCrash
from pawl.job_store.domain.calls import CallChange
from pawl.job_store.domain.commit import ROUND_STARTED, Commit, NewMessage
from pawl.job_store.domain.delegation import Delegation as LedgerDelegation
from pawl.job_store.domain.events import MessageAdded, OwnerEvent, RunChanged
from pawl.job_store.domain.inbox import AGENT_ENDED
from pawl.job_store.domain.rows import CallRow, CommandRow, RunRow
from pawl.job_store.domain.stop import read_ending
from pawl.job_store.domain.submit import Submit
from pawl.job_store.domain.unit_of_work import UnitOfWork

# A request and its answer take this long each.
_WAY_SECONDS = 0.001

STORE, USER = "store", "user"
T = TypeVar("T")


class Ids:
    """Ids that count."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def new(self, prefix: str) -> str:
        return f"{prefix}_{next(self._numbers):06}"


class FakeLedger:
    """A `WorkerLedger`, with what tests need to start runs and to send commands.

    What the rules hold opaque is pickled. `fault` is called around every request
    with its name and whether it has been carried out; what it raises reaches the
    caller, so a request can be lost before or after it was carried out.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.ids = Ids()
        self.unit = UnitOfWork()
        self.fault: Callable[[str, bool], Awaitable[None]] | None = None
        self.on_command: Callable[[RunKey], Awaitable[None]] | None = None
        self.steps: list[Step] = []
        self._now = now

    def time(self) -> datetime:
        return datetime.fromtimestamp(self._now(), UTC)

    # What tests do.

    def submit(
        self, text: str, options: RunOptions | None = None, conversation_id: str = "", undo: Undo | None = None
    ) -> RunKey:
        """Bring a message of the user; return the run that it started."""
        submitted = self._apply(
            Submit(
                store_id=STORE,
                user_id=USER,
                request_id="",
                fingerprint=b"",
                conversation_id=conversation_id,
                conversation_must_exist=False,
                policy=states.MessagePolicy.QUEUE,
                message=pickle.dumps(Message(role=Role.USER, run_id="", text=text)),
                steer=b"",
                interrupt=b"",
                options=pickle.dumps((options or RunOptions(), undo)),
                queue_max=10,
                store_queue_max=1000,
                token_budget=options.limits.total_tokens_max if options else 0,
                token_ceiling=options.limits.topped_up_tokens_max if options else 0,
            )
        )
        return RunKey(store_id=STORE, run_id=submitted.run.run_id)

    async def send(self, key: RunKey, kind: CommandKind, command_id: str = "") -> states.CommandOutcome:
        """Send a command to a run; return the receipt's outcome."""
        receipt = self._apply(
            commands.Send(
                store_id=key.store_id,
                run_id=key.run_id,
                user_id=USER,
                command_id=command_id or self.ids.new("cmd"),
                fingerprint=b"",
                command=_command(kind, self),
                payload=pickle.dumps(kind),
            )
        )
        if self.on_command is not None:
            await self.on_command(key)
        outcome: states.CommandOutcome = receipt.outcome
        return outcome

    def row(self, key: RunKey) -> RunRow:
        row = self.unit.runs.get((key.store_id, key.run_id))
        assert row is not None
        return row

    def run(self, key: RunKey) -> Run:
        """Return a run as the loop sees it."""
        row = self.row(key)
        output: str = pickle.loads(row.output) if row.output else ""  # noqa: S301  # our own
        options, undo, *below = pickle.loads(row.options)  # noqa: S301
        failure: RunFailure | None = pickle.loads(row.failure) if row.failure else None  # noqa: S301
        return Run(
            store_id=row.store_id,
            user_id=row.user_id,
            conversation_id=row.conversation_id,
            run_id=row.run_id,
            state=RunState[row.state.name],
            waits=tuple(list(WaitKind)[number] for number in row.waits),
            options=options,
            undo=undo,
            tools=pickle.loads(row.tools) if row.tools else (),  # noqa: S301
            round=row.round,
            last_seq=row.last_seq,
            usage=pickle.loads(row.usage) if row.usage else Usage(),  # noqa: S301
            failure=failure,
            stop_cause=StopCause[row.stop_cause.name] if row.stop_cause else None,
            output_text=output,
            active_seconds=row.active_seconds,
            unstopped_call_ids=pickle.loads(row.unstopped) if row.unstopped else (),  # noqa: S301
            parent_run_id=row.parent_run_id,
            parent_call_id=row.parent_call_id,
            depth=len(below[0]) if below else 0,
            above=below[0] if below else (),
            user_roles=below[1] if below else (),
        )

    def calls(self, key: RunKey) -> list[Call]:
        """Return the calls of a run, in order."""
        rows = [row for _, row in self.unit.calls.items() if row.run_id == key.run_id]
        return [_call(row) for row in sorted(rows, key=lambda row: (row.round, row.index))]

    def messages(self, key: RunKey) -> list[Message]:
        """Return the messages of the run's conversation, with their numbers."""
        conversation = self.row(key).conversation_id
        rows = [row for row in self.unit.messages.rows if row.conversation_id == conversation]
        return [
            replace(pickle.loads(row.body), run_id=row.run_id, number=row.number)  # noqa: S301
            for row in rows
        ]

    def events(self, key: RunKey) -> list[Any]:
        """Return what the log says: the owner's events as values, the ledger's own as they are."""
        return [
            pickle.loads(event.body.body) if isinstance(event.body, OwnerEvent) else event.body  # noqa: S301
            for event in self.unit.events.rows
            if event.run_id == key.run_id
        ]

    # WorkerLedger.

    async def claim(self, worker_id: str, *, runs_max: int, lease_seconds: float) -> tuple[Claim, ...]:
        await self._maybe_fail("claim", done=False)
        claims: list[Claim] = []
        for key, run in list(self.unit.runs.items()):
            if len(claims) < runs_max and run.claim_at is not None and run.claim_at <= self.time():
                end = self.time() + timedelta(seconds=lease_seconds)
                crashes = run.crashes + (run.worker_id is not None)
                claimed = replace(run, worker_id=worker_id, epoch=run.epoch + 1, claim_at=end, crashes=crashes)
                self.unit.put_run(claimed)
                claims.append(Claim(key=RunKey(store_id=key[0], run_id=key[1]), epoch=run.epoch + 1))
        await self._maybe_fail("claim", done=True)
        return tuple(claims)

    async def load(self, claim: Claim) -> Loaded:
        await self._maybe_fail("load", done=False)
        row = self._owned(claim)
        loaded = Loaded(
            run=self.run(claim.key),
            messages=tuple(_shown(self.messages(claim.key))),
            calls=tuple(self.calls(claim.key)),
            commands=self._inbox(claim.key),
            loop=loop_state.read(self.unit.loop_states.get(row.key) or b""),
            now=self._now(),
        )
        await self._maybe_fail("load", done=True)
        return loaded

    async def renew(self, worker_id: str, *, lease_seconds: float) -> Renewal:
        await self._maybe_fail("renew", done=False)
        held, told = set(), set()
        for key, run in list(self.unit.runs.items()):
            if run.worker_id == worker_id and run.claim_at is not None:
                self.unit.put_run(replace(run, claim_at=self.time() + timedelta(seconds=lease_seconds)))
                claim = Claim(key=RunKey(store_id=key[0], run_id=key[1]), epoch=run.epoch)
                held.add(claim)
                if self.unit.inbox(run):
                    told.add(claim)
        return Renewal(held=frozenset(held), with_commands=frozenset(told))

    async def release(self, worker_id: str) -> None:
        for _, run in list(self.unit.runs.items()):
            if run.worker_id == worker_id:
                self.unit.put_run(replace(run, worker_id=None, claim_at=self.time()))

    async def commit(self, claim: Claim, commit_id: str, step: Step) -> Committed:
        await self._maybe_fail("commit", done=False)
        committed = self._apply(_commit(claim, commit_id, step))
        self.steps.append(step)
        await self._maybe_fail("commit", done=True)
        return Committed(
            first_seq=committed.first_seq,
            last_seq=committed.last_seq,
            commands_pending=committed.commands_pending,
            time=committed.time.timestamp(),
        )

    async def report_crash(self, claim: Claim) -> bool:
        await self._maybe_fail("report_crash", done=False)
        key = claim.key
        quarantined: bool = self._apply(
            ReportCrash(store_id=key.store_id, run_id=key.run_id, epoch=claim.epoch, crashes_max=3)
        )
        return quarantined

    async def call(self, store_id: str, user_id: str, call_id: str) -> Call:
        await self._maybe_fail("call", done=False)
        row = self.unit.calls.get((store_id, call_id))
        if row is None:
            raise CallNotFound
        return _call(row)

    async def undo_sources(self, store_id: str, user_id: str, run_id: str) -> tuple[UndoSource, ...]:
        await self._maybe_fail("undo_sources", done=False)
        found = []
        for call in self.calls(RunKey(store_id=store_id, run_id=run_id)):
            ids = (undo.undo_call_id(call.call_id, attempt) for attempt in itertools.count(1))
            rows = itertools.takewhile(bool, (self.unit.calls.get((store_id, call_id)) for call_id in ids))
            found.append(UndoSource(call=call, tries=tuple(_call(row) for row in rows if row)))
        return tuple(found)

    async def list_commands(self, claim: Claim) -> tuple[Command, ...]:
        await self._maybe_fail("list_commands", done=False)
        return self._inbox(claim.key)

    def _inbox(self, key: RunKey) -> tuple[Command, ...]:
        return tuple(
            Command(
                command_id=row.command_id,
                user_id=row.user_id,
                time=row.time.timestamp(),
                kind=_ended(row) if row.name == AGENT_ENDED else pickle.loads(row.payload),  # noqa: S301
            )
            for row in self.unit.inbox(self.row(key))
        )

    def _owned(self, claim: Claim) -> RunRow:
        row = self.unit.runs.get((claim.key.store_id, claim.key.run_id))
        if row is None:
            raise RunNotFound
        if row.epoch != claim.epoch or row.worker_id is None:
            raise LeaseLost
        return row

    def _apply(self, operation: Any) -> Any:
        with self.unit.attempt():
            return operation.apply(self.unit, self.time(), self.ids)

    async def _maybe_fail(self, name: str, *, done: bool) -> None:
        await asyncio.sleep(_WAY_SECONDS)
        if self.fault is not None:
            await self.fault(name, done)


def _call(row: CallRow) -> Call:
    call: Call = pickle.loads(row.spec)  # noqa: S301
    began = row.start_time and row.start_time.timestamp()
    return replace(call, state=CallState[row.state.name], attempt=row.attempt, start_time=began)


def _ended(row: CommandRow) -> AgentEnded:
    ending = read_ending(row.payload)
    failure: RunFailure | None = pickle.loads(ending.failure) if ending.failure else None  # noqa: S301
    return AgentEnded(
        call_id=row.call_id,
        run_id=ending.run_id,
        state=RunState[ending.state.name],
        usage=pickle.loads(ending.usage) if ending.usage else Usage(),  # noqa: S301
        output_text=pickle.loads(ending.output) if ending.output else "",  # noqa: S301
        failure=failure,
    )


def _shown(messages: list[Message]) -> Iterable[Message]:
    """Return messages from the last summary on: it, and those after what it stands for."""
    summary = next((message for message in reversed(messages) if message.role is Role.SUMMARY), None)
    if summary is None:
        return messages
    later = [message for message in messages if message.role is not Role.SUMMARY]
    return [summary, *(message for message in later if message.number > summary.summarised_to_number)]


def _command(kind: CommandKind, ledger: FakeLedger) -> commands.Command:
    match kind:
        case ToolResult():
            return commands.ToolResult(call_id=kind.call_id, client_id="", offer_epoch=0)
        case Decide():
            call = ledger.unit.calls.get((STORE, kind.call_id))
            return commands.Decide(
                call_id=kind.call_id,
                kind=states.DecisionKind[kind.kind],
                digest=call.digest if call else "",
                arguments=kind.arguments_json,
                edited_digest=kind.edited_digest,
                reason=kind.reason,
            )
        case Steer():
            return commands.Steer(text_bytes=len(kind.text.encode()))
        case Cancel():
            return commands.Cancel(cause=states.StopCause[kind.cause])
        case Resolve():
            return commands.Resolve(call_id=kind.call_id)
        case TopUp():
            return commands.TopUp(tokens=kind.tokens)
        case _:
            raise NotImplementedError


def _delegation(each: Delegation) -> LedgerDelegation:
    return LedgerDelegation(
        call_id=each.call_id,
        run_id=each.run_id,
        message=pickle.dumps(Message(role=Role.USER, run_id="", text=each.text)),
        options=pickle.dumps((each.options, None, each.above, each.user_roles)),
        token_budget=each.options.limits.total_tokens_max,
        token_ceiling=each.options.limits.topped_up_tokens_max,
    )


def _commit(claim: Claim, commit_id: str, step: Step) -> Commit:
    time = datetime.fromtimestamp(step.wake_time, UTC) if step.wake_time is not None else None
    return Commit(
        store_id=claim.key.store_id,
        run_id=claim.key.run_id,
        epoch=claim.epoch,
        commit_id=commit_id,
        events=tuple(_event(event) for event in step.events),
        messages=tuple(
            NewMessage(
                message_id="",
                summarised_to=message.summarised_to_number,
                body=pickle.dumps(message),
                steer_bytes=len(message.text.encode()) if message.role is Role.USER else None,
            )
            for message in step.messages
        ),
        calls=tuple(map(_change, step.calls)),
        state=states.RunState[step.state] if step.state else None,
        waits=tuple(list(WaitKind).index(wait) for wait in step.waits),
        failure=pickle.dumps(step.failure) if step.failure else None,
        stop_cause=states.StopCause[step.stop_cause] if step.stop_cause else None,
        round=step.round,
        usage=pickle.dumps(step.usage) if step.usage else None,
        output=pickle.dumps(step.output_text) if step.output_text is not None else None,
        active_seconds=step.active_seconds,
        tools=pickle.dumps(step.tools) if step.tools else None,
        loop_state=step.loop_state,
        consumed=step.consumed_command_ids,
        lease=states.LeaseAction[step.lease_action],
        wake_time=time,
        after_seq=step.after_seq,
        unstopped=pickle.dumps(step.unstopped_call_ids) if step.unstopped_call_ids else None,
        delegations=tuple(map(_delegation, step.delegations)),
        give_up=pickle.dumps(Cancel(cause=StopCause.PARENT)),
    )


def _event(event: DomainEvent) -> OwnerEvent:
    kind = ROUND_STARTED if isinstance(event, RoundStarted) else type(event).__name__
    return OwnerEvent(type=kind, body=pickle.dumps(event))


def _change(call: Call) -> CallChange:
    return CallChange(
        call_id=call.call_id,
        round=call.round,
        index=call.index,
        state=states.CallState[call.state],
        tool_name=call.tool_name,
        tool_version=call.tool_version,
        fallback_tool_name=call.fallback_tool_name,
        arguments=call.arguments_json,
        attempt=call.attempt,
        digest=call.approval.digest if call.approval else "",
        deadline_time=datetime.fromtimestamp(call.deadline_time, UTC) if call.deadline_time is not None else None,
        result=pickle.dumps(call.result) if call.result else None,
        spec=pickle.dumps(call),
        child_run_id=call.child_run_id,
    )


def states_told(events: Iterable[Any]) -> list[str]:
    """Return the states of the run that a log tells of, in order."""
    return [event.run.state.name for event in events if isinstance(event, RunChanged)]


def texts_told(events: Iterable[Any]) -> list[str]:
    """Return the texts of the messages that a log tells of, in order."""
    return [pickle.loads(event.message.body).text for event in events if isinstance(event, MessageAdded)]  # noqa: S301


def transient(
    error: type[Exception], *, at: Iterable[int], name: str, done: bool = False
) -> Callable[[str, bool], Awaitable[None]]:
    """Return a fault that fails these requests of that name, counted from 0."""
    wanted, count = set(at), itertools.count()

    async def fault(request: str, carried_out: bool) -> None:
        if (request, carried_out) == (name, done) and next(count) in wanted:
            raise error

    return fault
