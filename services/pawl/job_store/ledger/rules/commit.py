"""Steps of a run, written for its owner atomically and fenced by the epoch."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final, assert_never

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import CallKey, CommandId, RunId, RunKey
from pawl.errors import IllegalTransition, InboxChanged, InvalidField, LeaseLost, RunEnded, RunNotFound
from pawl.job_store.ledger.rules import (
    calls,
    conversations,
    delegation,
    grants,
    inbox,
    jobs,
    log,
    run_table,
    stop,
    trimming,
)
from pawl.job_store.ledger.rules.calls import CallChange
from pawl.job_store.ledger.rules.delegation import Delegation
from pawl.job_store.ledger.rules.events import EventBody, MessageAdded, OwnerEvent, RunChanged
from pawl.job_store.ledger.rules.rows import Attention, CommandKey, CommandRow, LastCommit, MessageRow, RunRow
from pawl.job_store.ledger.rules.states import AttentionReason
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork, UsageChange
from pawl.values import CallState, LeaseAction, RunState, StopCause, WaitKind

ROUND_STARTED: Final = "round.started"
# agent-loop's failure reason for a run without tokens.
BUDGET_EXHAUSTED: Final = "BUDGET_EXHAUSTED"

_FIGURES: Final = ("round", "usage", "output", "active_seconds", "tools", "failure", "unstopped", "trace")

# Only these may wait for a command without a deadline (I3: every other run continues automatically).
_MAY_SLEEP: Final = frozenset({RunState.WAITING, RunState.NEEDS_ATTENTION})


class NewMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message to append.

    If `message_id` is empty, the ledger assigns one. `body` is opaque.

    `steer_bytes` is the text size of a message that steered the run, and None for other messages.
    """

    message_id: str
    summarised_to: int
    body: bytes
    steer_bytes: int | None = None


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One step.

    Fields that are None do not change anything. Fields of type `bytes` are opaque.

    An owner whose lease has expired may still commit until another worker claims the run, because fencing is by epoch,
    not by time. An owner's commit ids increase, so that a late copy of an earlier step is recognised.

    `model` is the model whose calls changed `usage`. `tokens_used` counts the tokens of the run's own model calls since
    the last commit. `asks_title` requests a title once the run has completed. `entered` lists the job notices in the
    step's messages. `tells_iteration` is the job iteration to report to the conversation, or 0 for none. `events_taken`
    counts the events that nodes of a workflow have consumed. `has_progressed` means that a job's open call has
    progressed further than ever before. `child_cancel` is the opaque command for the child run of a call that the step
    cancels.
    """

    run: RunKey
    epoch: int
    commit_id: str
    events: tuple[OwnerEvent, ...] = ()
    messages: tuple[NewMessage, ...] = ()
    calls: tuple[CallChange, ...] = ()
    state: RunState | None = None
    waits: tuple[int, ...] = ()
    failure: bytes | None = None
    exhausts_budget: bool = False
    stop_cause: StopCause | None = None
    round: int | None = None
    usage: bytes | None = None
    model: str = ""
    tokens_used: int = 0
    budget_run_id: RunId = RunId("")
    output: bytes | None = None
    active_seconds: float | None = None
    tools: bytes | None = None
    loop_state: bytes | None = None
    consumed: tuple[CommandId, ...] = ()
    lease: LeaseAction = LeaseAction.KEEP
    wake_time: datetime | None = None
    after_seq: int | None = None
    unstopped: bytes | None = None
    trace: str | None = None
    delegations: tuple[Delegation, ...] = ()
    asks_title: bool = False
    entered: tuple[jobs.Entered, ...] = ()
    tells_iteration: int = 0
    events_taken: int = 0
    has_progressed: bool = False
    child_cancel: bytes = b""

    @property
    def row_keys(self) -> RowKeys:
        store_id = self.run.store_id
        may_end = self.state is not None and self.state.is_terminal
        started = tuple(RunKey(store_id, each.run_id) for each in self.delegations)
        cancelled = tuple(
            RunKey(store_id, change.child_run_id)
            for change in self.calls
            if change.child_run_id and change.state is CallState.CANCELLED
        )
        notified = (RunKey(store_id, each.run_id) for each in self.entered)
        shared = (RunKey(store_id, self.budget_run_id),) if self.budget_run_id else ()
        needs_others = self.consumed or self.entered or started or cancelled or shared
        starts_job = (self.run,) if any(each.is_job for each in self.delegations) else ()
        is_alone = self.lease is LeaseAction.KEEP and not (needs_others or self.tells_iteration)
        return RowKeys(
            step=self.run if is_alone else None,
            runs=(self.run, *shared, *started, *cancelled, *notified),
            conversations_of=(self.run,) if self.messages or starts_job or WaitKind.JOB in self.waits else (),
            ends=(self.run, *cancelled) if may_end or self.tells_iteration or starts_job else cancelled,
            calls_of=(self.run,) if may_end else (),
            calls=tuple(CallKey(store_id, change.call_id) for change in self.calls),
            commands_of=(self.run, *cancelled),
            commands=tuple(CommandKey(store_id, self.run.run_id, command_id) for command_id in self.consumed),
        )

    def apply(self, unit: UnitOfWork) -> LastCommit:
        """Write the step.

        Repeating the last step of the run returns the same response.

        Raises:
            RunNotFound: The run does not exist.
            RunEnded: The run has ended.
            LeaseLost: Another worker holds the run, or the owner released it.
            InboxChanged: The step ignores an unread command, or `after_seq` is not the end of the log.
            IllegalTransition: A state table forbids the step.
            InvalidField: The step contradicts itself.
        """
        run = unit.runs.get(self.run)
        if run is None:
            raise RunNotFound
        last = run.last_commit
        if last is not None and (last.commit_id, last.epoch) == (self.commit_id, self.epoch):
            return last
        if run.state.is_terminal:
            raise RunEnded
        if run.epoch != self.epoch or run.worker_id is None:
            raise LeaseLost
        if last is not None and last.epoch == self.epoch and self.commit_id < last.commit_id:
            raise IllegalTransition("the run's owner has already committed a later step")
        return self._write(unit, run)

    def _write(self, unit: UnitOfWork, before: RunRow) -> LastCommit:
        if self.after_seq is not None and self.after_seq != before.last_seq:
            raise InboxChanged(f"the log ends at seq {before.last_seq}")
        self._consume(unit, before)
        self._check_stopping(unit, before)
        steps: list[EventBody] = [event for event in self.events if event.type != ROUND_STARTED]
        steps += self._append_messages(unit, before)
        changed, run = self._change_calls(unit, before)
        steps += changed
        run = jobs.enter(unit, run, self.entered)
        self._delegate(unit, run)
        steps += [event for event in self.events if event.type == ROUND_STARTED]
        if self.usage is not None and self.usage != before.usage:
            unit.usage.add([UsageChange(run=before, model=self.model, before=before.usage, after=self.usage)])
        run, trim = trimming.after_round(before, self._with_figures(run, unit.now), unit.iterations_kept)
        unit.trims.add([] if trim is None else [trim])
        run, shared_tokens_left = self._spend(unit, run)
        unread = unit.inbox(run)
        ends = self.state is not None and self.state.is_terminal
        if not ends:
            run = self._with_state(run, steps, unit.now)
            run = self._with_lease(unit, run, unread)
        run = log.write(unit, run, steps, attempt=self.epoch)
        if self.state is not None and self.state.is_terminal:
            if self.asks_title and self.state is RunState.COMPLETED:
                conversations.ask(unit, run)
            run = self._end(unit, run, self.state, unread=unread)
        if self.loop_state is not None:
            unit.loop_states.put(run.key, self.loop_state)
        last = LastCommit(
            commit_id=self.commit_id,
            epoch=self.epoch,
            first_seq=before.last_seq + 1 if run.last_seq > before.last_seq else 0,
            last_seq=run.last_seq,
            # Checking for notices when a message is added is soon enough for the next model call.
            commands_pending=not ends and (bool(unread) or (bool(self.messages) and jobs.has_notices(unit, run))),
            time=unit.now,
            shared_tokens_left=shared_tokens_left,
        )
        run = unit.put_run(replace(run, last_commit=last))
        if self.tells_iteration and run.reports_to and not ends:
            jobs.notify(unit, run, self.tells_iteration)
        return last

    def _consume(self, unit: UnitOfWork, run: RunRow) -> None:
        moved = {change.call_id for change in self.calls}
        for command_id in dict.fromkeys(self.consumed):
            command = unit.commands.get(CommandKey(run.store_id, run.run_id, command_id))
            if command is None or command.consumed:
                raise InboxChanged(f"command {command_id} is not in the inbox")
            if command.call_id and command.call_id not in moved:
                raise IllegalTransition(f"command {command_id} must be consumed by the step that moves its call")
            unit.put_command(replace(command, consumed=True))

    def _check_stopping(self, unit: UnitOfWork, run: RunRow) -> None:
        """If the run is being stopped, refuse new work and every change of state except ending (I12)."""
        if run.state is not RunState.CANCELLING:
            return
        starts = any(not change.state.is_terminal for change in self.calls) or any(
            event.type == ROUND_STARTED for event in self.events
        )
        # Only the ledger moves such a run to another state, by quarantine, and then takes it from its owner.
        ways = {state for state in run_table.TRANSITIONS[run.state] if state.is_terminal}
        is_detour = self.state is not None and self.state not in {run.state, *ways}
        if not (starts or is_detour):
            return
        if any(command.name == inbox.CANCEL for command in unit.inbox(run)):
            raise InboxChanged
        raise IllegalTransition("the run is being stopped, so nothing new can start in it")

    def _append_messages(self, unit: UnitOfWork, run: RunRow) -> Iterable[EventBody]:
        if not self.messages:
            return []
        conversation = unit.conversation_of(run)
        rows = [
            MessageRow(
                store_id=run.store_id,
                conversation_id=run.conversation_id,
                number=number,
                message_id=message.message_id or unit.ids.new("msg"),
                run_id=run.run_id,
                summarised_to=message.summarised_to,
                body=message.body,
                create_time=unit.now,
                user_id=conversation.author(run.user_id),
            )
            for number, message in enumerate(self.messages, conversation.last_number + 1)
        ]
        unit.messages.add(rows)
        unit.put_conversation(replace(conversation, last_number=rows[-1].number, update_time=unit.now))
        return [MessageAdded(message=row, user_id=run.user_id) for row in rows]

    def _change_calls(self, unit: UnitOfWork, run: RunRow) -> tuple[Iterable[EventBody], RunRow]:
        bodies = []
        for change in self.calls:
            before = unit.calls.get(CallKey(run.store_id, change.call_id))
            if before is not None and before.run_id != run.run_id:
                raise InvalidField(f"call {change.call_id} belongs to another run", field="calls.call_id")
            if before is None and any(command.name == inbox.PAUSE for command in unit.inbox(run)):
                # No iteration starts once a pause has been accepted. Nothing is lost if a read-only call has run.
                raise InboxChanged
            start = calls.implied_start(change) if before is None else None
            if start is not None:
                before = calls.create(run, start, now=unit.now)
                bodies.append(calls.changed(None, before))
            if before is None:
                call = calls.create(run, change, now=unit.now, is_granted=grants.covers(run, change))
            else:
                call = calls.move(run, before, change, self.consumed, now=unit.now)
            unit.put_call(call)
            run = grants.counted(run, before, call)
            if before is not None and call.state is CallState.CANCELLED:
                delegation.cancel_child(unit, before, self.child_cancel)
            bodies.append(calls.changed(before, call))
        return bodies, run

    def _delegate(self, unit: UnitOfWork, run: RunRow) -> None:
        delegated = {
            change.call_id: (change.child_run_id, change.state is CallState.DETACHED)
            for change in self.calls
            if change.state in calls.WITH_CHILD
        }
        if {each.call_id: (each.run_id, each.is_job) for each in self.delegations} != delegated:
            raise InvalidField("each delegated call must have exactly one delegation", field="delegations")
        for each in self.delegations:
            delegation.start(unit, run, each)

    def _with_figures(self, run: RunRow, now: datetime) -> RunRow:
        figures = ((name, getattr(self, name)) for name in _FIGURES)
        steers = [message.steer_bytes for message in self.messages if message.steer_bytes is not None]
        return replace(
            run,
            steers_waiting=max(0, run.steers_waiting - len(steers) - self.events_taken),
            steer_bytes_waiting=max(0, run.steer_bytes_waiting - sum(steers)),
            crashes=0 if self._progresses() or self.lease is LeaseAction.PARK else run.crashes,
            progress_time=now if self._progresses() else run.progress_time,
            # The cause of an accepted cancellation is final. The owner knows it only from the command.
            stop_cause=self.stop_cause if run.stop_cause is None else run.stop_cause,
            **{name: value for name, value in figures if value is not None},
        )

    def _spend(self, unit: UnitOfWork, run: RunRow) -> tuple[RunRow, int | None]:
        top = unit.runs.get(RunKey(run.store_id, run.budget_run_id)) if run.budget_run_id else run
        if top is None:
            # Retention has removed the run that owns the budget.
            return run, 0
        if not top.token_budget:
            return run, None
        top = replace(top, shared_tokens_used=top.shared_tokens_used + self.tokens_used)
        if run.budget_run_id:
            unit.put_run(top)
        return run if run.budget_run_id else top, top.shared_tokens_left

    def _progresses(self) -> bool:
        """Return whether the step adds a message, settles a call, or reports progress on a job's open call."""
        settles = any(change.state.is_terminal for change in self.calls)
        return bool(self.messages) or settles or self.has_progressed

    def _with_state(self, run: RunRow, steps: list[EventBody], now: datetime) -> RunRow:
        """Return the run in its new open state. If anything has changed, add an event to `steps`.

        The change to RUNNING comes before the step's other events. Changes to other states come after them.
        """
        if self.state is None:
            return run
        waits = self.waits if self.state is RunState.WAITING else ()
        if self.state is RunState.WAITING and not waits:
            raise InvalidField("a WAITING run must have at least one wait", field="waits")
        if self.state is RunState.CANCELLING and run.stop_cause is None:
            # Otherwise a quarantine would lose the fact that the run was stopped.
            raise InvalidField("a CANCELLING run must have a stop_cause", field="stop_cause")
        if self.state is run.state and waits == run.waits:
            return run
        if self.state is not run.state:
            run_table.check(run.state, self.state)
        attention = None
        if self.state is RunState.NEEDS_ATTENTION:
            attention = Attention(reason=AttentionReason.UNKNOWN_OUTCOME, since_time=now)
        moved = replace(run, state=self.state, waits=waits, attention=attention)
        changed = RunChanged(from_state=run.state, from_waits=run.waits, run=moved)
        steps.insert(0 if self.state is RunState.RUNNING else len(steps), changed)
        return moved

    def _with_lease(self, unit: UnitOfWork, run: RunRow, unread: list[CommandRow]) -> RunRow:
        match self.lease:
            case LeaseAction.KEEP:
                return run
            case LeaseAction.PARK:
                # With unread commands the run is claimable immediately: its owner may not know that it is being
                # stopped.
                if self.wake_time is None and not unread and run.state not in _MAY_SLEEP:
                    raise InvalidField(
                        f"a parked run in state {run.state.name} must have a wake_time", field="wake_time"
                    )
                is_due = bool(unread) or (WaitKind.JOB in run.waits and jobs.need_run(unit, run))
                claim_at = unit.now if is_due else self.wake_time
            case LeaseAction.RELEASE:
                claim_at = unit.now
            case _:
                assert_never(self.lease)
        if claim_at is not None and claim_at <= unit.now:
            unit.work_ready = True
        return replace(run, worker_id=None, claim_at=claim_at)

    def _end(self, unit: UnitOfWork, run: RunRow, state: RunState, *, unread: list[CommandRow]) -> RunRow:
        if state is RunState.FAILED and not run.failure:
            raise InvalidField("a FAILED run must have a failure", field="failure")
        if state is RunState.CANCELLED and run.stop_cause is None:
            raise InvalidField("a CANCELLED run must have a stop_cause", field="stop_cause")
        if any(command.name in {inbox.STEER, inbox.TOP_UP, inbox.RAISE_GOAL} for command in unread):
            # An accepted message must not be lost (I1): the owner appends it first. Nor may a run end for lack of
            # tokens or attempts while a top-up is unread.
            raise InboxChanged
        still_open = unit.open_calls(run)
        if any(call.reserved_by for call in still_open):
            raise InboxChanged
        if still_open:
            raise IllegalTransition(f"call {still_open[0].call_id} is open: settle it first")
        if self.exhausts_budget:
            jobs.stop_turns(unit, run)
        return stop.end(unit, run, state, attempt=self.epoch)
