"""Commands to a run and their receipts. Receipts are final.

A command that settles or decides on a call reserves the call in the same transaction. From then on, only a step that
consumes the command can change the call's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import ClassVar, Final, TypeAlias, assert_never

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import (
    CallId,
    CallKey,
    ClientId,
    ConversationId,
    RunId,
    RunKey,
    SessionId,
    UserId,
)
from pawl.errors import (
    AttentionNotNeeded,
    CallNotFound,
    CallNotPending,
    NoTokenBudget,
    PawlError,
    RequestIdReused,
    RunEnded,
    RunNotFound,
    TokenCeiling,
)
from pawl.job_store.ledger.rules import attention, inbox, jobs, log, offers, stop, turn
from pawl.job_store.ledger.rules.decisions import Decide, Decider
from pawl.job_store.ledger.rules.events import CallChanged, OperatorActed, ToolProgressed, ToppedUp
from pawl.job_store.ledger.rules.inbox import Refused, Replaced
from pawl.job_store.ledger.rules.rows import CallRow, CommandKey, CommandRow, RunRow
from pawl.job_store.ledger.rules.states import OperatorAct, RunProgram
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork
from pawl.values import TOKENS_MAX, CallState, CommandOutcome, DecisionRight, RunState, StopCause

# The log reports the progress of a call at most once in this period.
PROGRESS_PAUSE: Final = timedelta(seconds=0.1)


class OfOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a command about an offered call. If the sender does not name a client, `client_id` is empty."""

    call_id: CallId
    client_id: ClientId
    offer_epoch: int


class ToolResult(OfOffer, frozen=True, kw_only=True):
    name: ClassVar[str] = "tool_result"


class Steer(msgspec.Struct, frozen=True, kw_only=True):
    name: ClassVar[str] = inbox.STEER
    text_bytes: int = 0


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    name: ClassVar[str] = inbox.CANCEL
    cause: StopCause
    reason: str = ""


class Resolve(msgspec.Struct, frozen=True, kw_only=True):
    name: ClassVar[str] = "resolve"
    call_id: CallId


class Redrive(msgspec.Struct, frozen=True, kw_only=True):
    name: ClassVar[str] = "redrive"
    reason: str = ""


class Progress(OfOffer, frozen=True, kw_only=True):
    name: ClassVar[str] = "progress"
    fraction: float | None
    message: str


class TopUp(msgspec.Struct, frozen=True, kw_only=True):
    name: ClassVar[str] = inbox.TOP_UP
    tokens: int


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """Pauses or resumes a job or a workflow. Only the run's owner reads which one is requested."""

    name: ClassVar[str] = inbox.PAUSE


class RaiseGoal(msgspec.Struct, frozen=True, kw_only=True):
    """Raises a goal's limits.

    `check` raises a PawlError if the limits are not valid for the encoded run and its unread RaiseGoal commands.
    """

    name: ClassVar[str] = inbox.RAISE_GOAL
    tokens: int
    check: Callable[[bytes, Sequence[bytes]], None]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event for a workflow run. Only the run's owner reads it. `name` is derived from the event's own name.

    `is_awaited` means that a node was waiting for it when the sender read the run.
    """

    name: str
    is_awaited: bool = False


Command: TypeAlias = (
    ToolResult | Decide | Steer | Cancel | Resolve | Redrive | Progress | TopUp | RaiseGoal | Pause | Event
)
# Commands about the run as a whole.
_WITHOUT_CALL: Final = (Steer, Cancel, Redrive, TopUp, RaiseGoal, Pause, Event)


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The final outcome of a command, and the run with its pending calls afterwards. UNKNOWN has no run."""

    outcome: CommandOutcome
    reason: str = ""
    message: str = ""
    run: RunRow | None = None
    pending: tuple[CallRow, ...] = ()


class Send(Decider, frozen=True, kw_only=True):
    """Send `command` to a run.

    `payload` is opaque to the ledger. Only the run's owner reads it.

    With `as_operator`, the run may belong to any user of the store, and its log records the action. With
    DecisionRight.STORE, a decision may also be about another user's call, if that call needs approval. A user may
    always decide on a call that names this user. If `session_id` is set, reports about a front-end call count only if
    that session holds the call. If `reports_to` is set, the run must be a job of that conversation, or of the run
    `started_by`.
    """

    run: RunKey
    fingerprint: bytes
    command: Command
    payload: bytes
    as_operator: bool = False
    session_id: SessionId = SessionId("")
    inbox_limits: inbox.Limits = inbox.LIMITS
    reports_to: ConversationId = ConversationId("")
    started_by: RunId = RunId("")

    @property
    def row_keys(self) -> RowKeys:
        call_id = _call_of(self.command)
        return RowKeys(
            runs=(self.run,),
            ends=(self.run,) if isinstance(self.command, Cancel) else (),
            calls_of=(self.run,),
            calls=(CallKey(self.run.store_id, call_id),) if call_id else (),
            commands_of=(self.run,),
            commands=(CommandKey(self.run.store_id, self.run.run_id, self.command_id),),
            owner=UserId("") if self.as_operator or self._may_approve else self.user_id,
        )

    def apply(self, unit: UnitOfWork) -> Receipt:
        """Accept or refuse the command.

        A repeat of an accepted command is a DUPLICATE. A repeat of a refused command is refused again.

        The run keeps a limited number of receipts for commands that had no effect. Without a receipt, a repeated
        command is evaluated again.

        Raises:
            RequestIdReused: The command id was used with a different payload.
            QueueFull: Too many commands of this kind are waiting. The command may be sent again.
        """
        run = unit.runs.get(self.run)
        if run is None or not (self.as_operator or run.user_id == self.user_id or self._approves(unit, run)):
            return _unknown(RunNotFound())
        is_own_job = run.reports_to != "" and self.started_by != "" and run.parent_run_id == self.started_by
        if self.reports_to not in ("", run.reports_to) and not is_own_job:
            return _unknown(RunNotFound())
        earlier = unit.commands.get(CommandKey(run.store_id, run.run_id, self.command_id))
        if earlier is not None:
            return self._repeat(unit, run, earlier)
        incoming = inbox.arrived(
            unit,
            run,
            name=self.command.name,
            payload=self.payload,
            command_id=self.command_id,
            user_id=self.user_id,
            fingerprint=self.fingerprint,
            credential_id=self.credential_id,
            delegate_user_id=self.delegate_user_id,
        )
        try:
            run = self._take(unit, run, incoming)
        except Refused as refusal:
            error = refusal.error
            if refusal.outcome is CommandOutcome.UNKNOWN:
                return _unknown(error)
            incoming = replace(incoming, outcome=refusal.outcome, reason=error.reason, message=error.message)
            if not isinstance(refusal, Replaced):
                run = inbox.keep_receipt(unit, run, incoming, self.inbox_limits)
        return _receipt(unit, run, incoming)

    @property
    def _may_approve(self) -> bool:
        return isinstance(self.command, Decide) and self.command.right is DecisionRight.STORE

    def _approves(self, unit: UnitOfWork, run: RunRow) -> bool:
        if not isinstance(self.command, Decide):
            return False
        call = _call_of_run(unit, run, self.command.call_id)
        if call is None or call.asked_user_id:
            return call is not None and call.asked_user_id == self.user_id
        return self._may_approve and call.digest != "" and call.state is not CallState.ASKED

    def _repeat(self, unit: UnitOfWork, run: RunRow, earlier: CommandRow) -> Receipt:
        if (earlier.fingerprint, earlier.user_id) != (self.fingerprint, self.user_id):
            raise RequestIdReused
        is_taken = earlier.outcome is CommandOutcome.ACCEPTED
        outcome = CommandOutcome.DUPLICATE if is_taken else earlier.outcome
        return _receipt(unit, run, replace(earlier, outcome=outcome))

    def _take(self, unit: UnitOfWork, run: RunRow, incoming: CommandRow) -> RunRow:
        command = self.command
        if (run.state.is_terminal or run.is_stopping) and isinstance(command, Decide):
            # If another user has already decided, the sender gets that outcome, even after the run has ended.
            inbox.check_undecided(_call_of_run(unit, run, command.call_id))
        if run.state.is_terminal:
            raise Refused(CommandOutcome.LATE, RunEnded())
        if isinstance(command, Cancel):
            return self._cancel(unit, run, incoming, command)
        if isinstance(command, TopUp | RaiseGoal | Pause | Event) and run.is_stopping:
            raise Refused(CommandOutcome.LATE, RunEnded("the run is being stopped"))
        if isinstance(command, RaiseGoal):
            try:
                unread = [each.payload for each in unit.inbox(run) if each.name == command.name]
                command.check(run.options + run.output, unread)
            except PawlError as error:
                raise Refused(CommandOutcome.REFUSED, error) from None
            if not command.tokens:
                return turn.wake(unit, inbox.accept_one_more(unit, run, incoming, self.inbox_limits))
        if isinstance(command, TopUp | RaiseGoal):
            return self._top_up(unit, run, incoming, command.tokens)
        if isinstance(command, Pause | Event):
            if not (run.program is RunProgram.WORKFLOW or (run.reports_to and isinstance(command, Pause))):
                raise Refused(CommandOutcome.UNKNOWN, RunNotFound("the run is not a job or workflow"))
            if isinstance(command, Event):
                run = inbox.keep_event(unit, run, incoming, self.inbox_limits, is_awaited=command.is_awaited)
            return turn.wake(unit, inbox.accept_one_more(unit, run, incoming, self.inbox_limits))
        if isinstance(command, Redrive):
            if not run.is_quarantined:
                raise Refused(CommandOutcome.REFUSED, AttentionNotNeeded("the run is not quarantined"))
            run = inbox.accept(unit, run, incoming, consumed=True)
            run = self._log_act(unit, run, OperatorAct.REDRIVEN, reason=command.reason)
            return attention.redrive(unit, run)
        if run.is_stopping:
            raise Refused(CommandOutcome.LATE, CallNotPending("the run is being stopped"))
        if isinstance(command, Steer):
            text_bytes = command.text_bytes
            run = inbox.accept_message(
                unit, run, incoming, self.inbox_limits, text_bytes=text_bytes, people=self.people
            )
            return turn.wake(unit, run)
        call = _call_of_run(unit, run, command.call_id)
        if call is None:
            raise Refused(CommandOutcome.UNKNOWN, CallNotFound())
        match command:
            case ToolResult():
                _check_result(call, command, self.session_id, unit.now)
            case Decide():
                call = self.decide(run, call, command, unit.now)
                if call.decision is None and call.state is not CallState.ASKED:
                    return _count(unit, run, call, incoming)
            case Resolve():
                _check_resolve(run, call)
                run = self._log_act(unit, run, OperatorAct.RESOLVED, call_id=call.call_id)
            case Progress():
                _check_offered(call)
                _check_holder(call, command, self.session_id)
                return _progress(unit, run, call, command, incoming)
            case _:
                assert_never(command)
        unit.put_call(replace(call, reserved_by=incoming.command_id))
        run = inbox.accept(unit, run, replace(incoming, call_id=call.call_id))
        return turn.wake(unit, run)

    def _top_up(self, unit: UnitOfWork, run: RunRow, incoming: CommandRow, tokens: int) -> RunRow:
        """Raise the budget immediately, so that concurrent top-ups together cannot exceed the ceiling."""
        if run.budget_run_id:
            message = f"the run uses the token budget of run {run.budget_run_id}: top up that run instead"
            raise Refused(CommandOutcome.REFUSED, NoTokenBudget(message))
        if not run.token_budget:
            raise Refused(CommandOutcome.REFUSED, NoTokenBudget())
        budget, ceiling = run.token_budget + tokens, run.token_ceiling or TOKENS_MAX
        if budget > ceiling:
            left = max(0, ceiling - run.token_budget)
            raise Refused(CommandOutcome.REFUSED, TokenCeiling(f"at most {left} more tokens can be added"))
        run = replace(run, token_budget=budget, topped_up_tokens=run.topped_up_tokens + tokens)
        run = inbox.accept_one_more(unit, run, incoming, self.inbox_limits)
        body = ToppedUp(tokens=tokens, token_budget=budget, user_id=incoming.user_id)
        return turn.wake(unit, log.write(unit, run, [body]))

    def _cancel(self, unit: UnitOfWork, run: RunRow, incoming: CommandRow, command: Cancel) -> RunRow:
        if run.state is RunState.CANCELLING:
            # Already being stopped: report success.
            return inbox.keep_receipt(unit, run, incoming, self.inbox_limits)
        run = inbox.accept(unit, run, incoming)
        run = self._log_act(unit, run, OperatorAct.ENDED, reason=command.reason)
        cause = command.cause
        if cause is StopCause.MODEL and jobs.receiver_of(unit, run) not in {"", self.started_by}:
            cause = StopCause.PARENT  # The model to be notified of the job's end did not stop it.
        return stop.request(unit, run, cause)

    def _log_act(
        self, unit: UnitOfWork, run: RunRow, act: OperatorAct, *, call_id: CallId = CallId(""), reason: str = ""
    ) -> RunRow:
        if not self.as_operator:
            return run
        acted = OperatorActed(user_id=self.user_id, act=act, call_id=call_id, reason=reason)
        return log.write(unit, run, [acted])


def _call_of(command: Command) -> CallId | None:
    return None if isinstance(command, _WITHOUT_CALL) else command.call_id


def _unknown(error: PawlError) -> Receipt:
    return Receipt(outcome=CommandOutcome.UNKNOWN, reason=error.reason, message=error.message)


def _call_of_run(unit: UnitOfWork, run: RunRow, call_id: CallId) -> CallRow | None:
    call = unit.calls.get(CallKey(run.store_id, call_id))
    return call if call is not None and call.run_id == run.run_id else None


def _receipt(unit: UnitOfWork, run: RunRow, command: CommandRow) -> Receipt:
    pending = tuple(call for call in unit.open_calls(run) if offers.is_pending(run, call))
    run = unit.runs.get(run.key) or run
    return Receipt(outcome=command.outcome, reason=command.reason, message=command.message, run=run, pending=pending)


def _check_offered(call: CallRow) -> None:
    inbox.check_open(call)
    if call.state is not CallState.OFFERED:
        raise Refused(CommandOutcome.REFUSED, CallNotPending())


def _check_result(call: CallRow, command: ToolResult, session_id: SessionId, now: datetime) -> None:
    _check_offered(call)
    inbox.check_deadline(call, now)
    if command.client_id:
        _check_holder(call, command, session_id)
    elif call.offer is not None and call.offer.is_held(now):
        raise Refused(CommandOutcome.WRONG_HOLDER, CallNotPending("a client holds the call"))


def _check_holder(call: CallRow, command: ToolResult | Progress, session_id: SessionId) -> None:
    offer = call.offer
    if offer is None or (offer.client_id, offer.epoch) != (command.client_id, command.offer_epoch):
        raise Refused(CommandOutcome.WRONG_HOLDER, CallNotPending("the client does not hold the call"))
    if session_id and session_id != offer.session_id:
        raise Replaced(CommandOutcome.WRONG_HOLDER, CallNotPending("another stream of the client holds the call"))


def _count(unit: UnitOfWork, run: RunRow, call: CallRow, incoming: CommandRow) -> RunRow:
    """Store and log an approval while more approvals are needed. The run's owner adds it to the audit chain."""
    unit.put_call(call)
    run = inbox.accept(unit, run, incoming, consumed=True)
    run = log.write(unit, run, [CallChanged(from_state=call.state, call=call)])
    return turn.wake(unit, run)


def _check_resolve(run: RunRow, call: CallRow) -> None:
    inbox.check_open(call)
    in_doubt = run.state is RunState.NEEDS_ATTENTION and not run.is_quarantined
    if not in_doubt or call.state is not CallState.RUNNING:
        raise Refused(CommandOutcome.REFUSED, CallNotPending("the call needs no resolution: its outcome is known"))


def _progress(unit: UnitOfWork, run: RunRow, call: CallRow, command: Progress, incoming: CommandRow) -> RunRow:
    """Write the call's progress to the log and renew the client's lease, without involving the run's owner.

    A report that arrives too soon after the previous one only renews the lease. It is not logged and does not get a
    receipt.
    """
    call = offers.renewed(call, now=unit.now)
    if call.progress_time is not None and unit.now < call.progress_time + PROGRESS_PAUSE:
        unit.put_call(call)
        return run
    call = replace(call, progress_time=unit.now)
    unit.put_call(call)
    body = ToolProgressed(call=call, fraction=command.fraction, message=command.message)
    run = inbox.accept(unit, run, incoming, consumed=True)
    return log.write(unit, run, [body])
