"""The inbox of a run: commands that its owner has yet to act on.

It is bounded, whether anybody reads it or not. What settles or decides a call comes
once for each open call, and one stop is all that is kept; messages, top-ups
and pauses are counted, and so are receipts of commands that changed nothing. A message counts until
it stands in the conversation, wherever its owner keeps it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import CallId, CommandId, CredentialId, RunKey, UserId
from pawl.errors import AlreadyDecided, CallNotPending, DeadlinePassed, PawlError, QueueFull, RunNotFound
from pawl.job_store.ledger.rules import turn
from pawl.job_store.ledger.rules.calls import people_of
from pawl.job_store.ledger.rules.rows import CallRow, CommandRow, RunRow
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork
from pawl.values import CommandOutcome, DecisionKind

STEER: Final = "steer"
CANCEL: Final = "cancel"
TOP_UP: Final = "top_up"
PAUSE: Final = "pause"
AGENT_ENDED: Final = "agent_ended"
COMPLETED: Final = "completed"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Most messages, top-ups and pauses, each, that wait for the owner of a run, and most bytes of those messages.

    `idle_receipts_max` is the most receipts that a run keeps of commands that changed nothing, and
    `people_max` the most people but those who started it whose messages enter it.
    """

    commands_max: int = 100
    bytes_max: int = 1024 * 1024
    idle_receipts_max: int = 100
    people_max: int = 32


LIMITS: Final = Limits()


def arrived(
    unit: UnitOfWork,
    run: RunRow,
    *,
    name: str,
    payload: bytes,
    command_id: CommandId = CommandId(""),
    user_id: UserId = UserId(""),
    fingerprint: bytes = b"",
    call_id: CallId = CallId(""),
    credential_id: CredentialId = CredentialId(""),
    delegate_user_id: UserId = UserId(""),
) -> CommandRow:
    """Return a command that has come for `run` and is not in its inbox yet.

    Without an id it gets one, and without a user it is of the run's. `call_id` is the call that it settles or decides.
    """
    return CommandRow(
        store_id=run.store_id,
        run_id=run.run_id,
        command_id=command_id or CommandId(unit.ids.new("cmd")),
        number=run.command_count + 1,
        user_id=user_id or run.user_id,
        time=unit.now,
        name=name,
        call_id=call_id,
        fingerprint=fingerprint,
        payload=payload,
        credential_id=credential_id,
        delegate_user_id=delegate_user_id,
    )


def accept_message(
    unit: UnitOfWork,
    run: RunRow,
    incoming: CommandRow,
    limits: Limits,
    *,
    text_bytes: int,
    people: Iterable[UserId],
) -> RunRow:
    """Put a message into the inbox of `run`; returns the run. `people` are others whose act the message is, too.

    Raises:
        QueueFull: too many wait there, or it is by one more than the run can keep.
    """
    size_bytes = run.steer_bytes_waiting + text_bytes
    if run.steers_waiting >= limits.commands_max or size_bytes > limits.bytes_max:
        waiting = f"{run.steers_waiting} messages with {run.steer_bytes_waiting} bytes wait to be read by this run"
        raise QueueFull(f"{waiting}: send this one again when it has read some, or queue it")
    steered_by = {incoming.user_id, incoming.delegate_user_id, *people, *run.steered_by} - people_of(run) - {UserId("")}
    if len(steered_by) > max(limits.people_max, len(run.steered_by)):
        raise QueueFull(f"messages of {limits.people_max} more people have entered this run: queue this one")
    run = replace(run, steers_waiting=run.steers_waiting + 1, steer_bytes_waiting=size_bytes)
    run = replace(run, steered_by=tuple(sorted(steered_by)))
    return accept(unit, run, incoming)


def accept_one_more(unit: UnitOfWork, run: RunRow, incoming: CommandRow, limits: Limits) -> RunRow:
    """Put a top-up or a pause into the inbox of `run`; returns the run.

    Raises:
        QueueFull: too many of its kind wait there.
    """
    if sum(command.name == incoming.name for command in unit.inbox(run)) >= limits.commands_max:
        many = f"{limits.commands_max} commands {incoming.name} wait"
        raise QueueFull(f"{many} to be read by this run: send this one again later")
    return accept(unit, run, incoming)


def accept(unit: UnitOfWork, run: RunRow, incoming: CommandRow, *, consumed: bool = False) -> RunRow:
    """Put a command into the inbox of `run`, or only its receipt if it is `consumed` at once; returns the run."""
    if consumed:
        incoming = replace(incoming, payload=b"", consumed=True)
    unit.put_command(incoming)
    return unit.put_run(replace(run, command_count=incoming.number))


def keep_receipt(unit: UnitOfWork, run: RunRow, incoming: CommandRow, limits: Limits) -> RunRow:
    """Remember a command that changes nothing, unless too many did; returns the run.

    Without its receipt the same command is judged anew when it comes again.
    """
    if run.idle_receipts >= limits.idle_receipts_max:
        return run
    return accept(unit, replace(run, idle_receipts=run.idle_receipts + 1), incoming, consumed=True)


class NoteCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Tell a run that one of its calls was completed; `payload` is opaque: what its owner will read."""

    run: RunKey
    payload: bytes

    @property
    def row_keys(self) -> RowKeys:
        """The rows it needs."""
        return RowKeys(runs=(self.run,), commands_of=(self.run,))

    def apply(self, unit: UnitOfWork) -> None:
        """Put the news into the inbox, once while it is unread; a run that has ended wants none.

        Raises:
            RunNotFound: no such run.
        """
        run = unit.runs.get(self.run)
        if run is None:
            raise RunNotFound
        if run.state.is_terminal or any(command.payload == self.payload for command in unit.inbox(run)):
            return
        incoming = arrived(unit, run, name=COMPLETED, payload=self.payload)
        turn.wake(unit, accept(unit, run, incoming))


class Refused(Exception):
    """A command is not taken; `error` says why."""

    def __init__(self, outcome: CommandOutcome, error: PawlError) -> None:
        self.outcome = outcome
        self.error = error
        super().__init__(error.reason)


_DONE: Final = {
    DecisionKind.APPROVE: "approved",
    DecisionKind.EDIT: "edited and approved",
    DecisionKind.REJECT: "rejected",
    DecisionKind.ANSWER: "answered",
}


class Replaced(Refused):
    """A command of a session that lost the call to another of its client. Not kept: that one may send it again."""


def check_open(call: CallRow) -> None:
    """Refuse a command about a call that is settled, decided or reserved by an earlier command."""
    if call.state.is_terminal or call.reserved_by:
        check_undecided(call)
        raise Refused(CommandOutcome.LATE, CallNotPending())


def check_undecided(call: CallRow | None) -> None:
    """Refuse a command about a call that somebody has decided."""
    if call is not None and call.decision is not None:
        did = _DONE[call.decision.kind]
        raise Refused(
            CommandOutcome.LATE, AlreadyDecided(f"{call.tool_name} was {did} before, by {call.decision.user_id}")
        )


def check_deadline(call: CallRow, now: datetime) -> None:
    """Refuse a command about a call that had to be answered before `now`."""
    if call.deadline_time is not None and call.deadline_time <= now:
        raise Refused(CommandOutcome.LATE, DeadlinePassed())
