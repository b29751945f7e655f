"""The inbox of a run: the commands on which the run's owner has not acted yet.

The inbox is bounded even if no worker reads it. It stores one decision or result per open call, and one stop. The
numbers of messages, top-ups, pauses and raised limits are limited, and so is the number of receipts of commands that
had no effect. A message counts until it is in the conversation, even if the owner has already read it.
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
RAISE_GOAL: Final = "raise_goal"
EVENT: Final = "event"
AGENT_ENDED: Final = "agent_ended"
COMPLETED: Final = "completed"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the inbox of a run.

    `commands_max` limits the waiting messages, top-ups and pauses (each separately), and `bytes_max` limits the total
    text size of the messages. `idle_receipts_max` limits the receipts of commands that had no effect. `people_max`
    limits the number of people whose messages enter the run, not counting the people who started it.
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
    """Return a new command for `run`, without adding it to the inbox.

    An empty `command_id` is replaced by a new id, and an empty `user_id` by the run's user. `call_id` is the call that
    the command settles or decides on.
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
    """Put a message into the inbox of `run`. Return the changed run.

    `people` lists the other people behind the message.

    Raises:
        QueueFull: Too many messages are waiting, or messages from too many people have entered the run.
    """
    size_bytes = run.steer_bytes_waiting + text_bytes
    if run.steers_waiting >= limits.commands_max or size_bytes > limits.bytes_max:
        waiting = f"{run.steers_waiting} messages with {run.steer_bytes_waiting} bytes are waiting for this run"
        raise QueueFull(f"{waiting}: send the message again later, or queue it")
    steered_by = {incoming.user_id, incoming.delegate_user_id, *people, *run.steered_by} - people_of(run) - {UserId("")}
    if len(steered_by) > max(limits.people_max, len(run.steered_by)):
        raise QueueFull(
            f"messages from {limits.people_max} other people have already entered this run: queue this message"
        )
    run = replace(run, steers_waiting=run.steers_waiting + 1, steer_bytes_waiting=size_bytes)
    run = replace(run, steered_by=tuple(sorted(steered_by)))
    return accept(unit, run, incoming)


def keep_event(unit: UnitOfWork, run: RunRow, incoming: CommandRow, limits: Limits, *, is_awaited: bool) -> RunRow:
    """Count one more event that no workflow node has consumed. Return the changed run.

    Raises:
        QueueFull: Too many events are stored, and either no node is waiting for this one or another unread event
            already ends the wait.
    """
    ends_wait = is_awaited and all(command.name != incoming.name for command in unit.inbox(run))
    if run.steers_waiting >= limits.commands_max and not ends_wait:
        raise QueueFull(
            f"the run already has {run.steers_waiting} events that no node has consumed: send the event again later"
        )
    return replace(run, steers_waiting=run.steers_waiting + 1)


def accept_one_more(unit: UnitOfWork, run: RunRow, incoming: CommandRow, limits: Limits) -> RunRow:
    """Put a top-up or a pause into the inbox of `run`. Return the changed run.

    Raises:
        QueueFull: Too many commands of the same kind are waiting.
    """
    if sum(command.name == incoming.name for command in unit.inbox(run)) >= limits.commands_max:
        many = f"{limits.commands_max} {incoming.name} commands are waiting"
        raise QueueFull(f"{many} for this run: send the command again later")
    return accept(unit, run, incoming)


def accept(unit: UnitOfWork, run: RunRow, incoming: CommandRow, *, consumed: bool = False) -> RunRow:
    """Put a command into the inbox of `run`, or only its receipt if the command is already `consumed`.

    Return the changed run.
    """
    if consumed:
        incoming = replace(incoming, payload=b"", consumed=True)
    unit.put_command(incoming)
    return unit.put_run(replace(run, command_count=incoming.number))


def keep_receipt(unit: UnitOfWork, run: RunRow, incoming: CommandRow, limits: Limits) -> RunRow:
    """Store the receipt of a command that had no effect, unless there are too many receipts. Return the changed run.

    Without its receipt, a repeated command is evaluated again.
    """
    if run.idle_receipts >= limits.idle_receipts_max:
        return run
    return accept(unit, replace(run, idle_receipts=run.idle_receipts + 1), incoming, consumed=True)


class NoteCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Notify a run that one of its calls was completed. `payload` is opaque to the ledger."""

    run: RunKey
    payload: bytes

    @property
    def row_keys(self) -> RowKeys:
        return RowKeys(runs=(self.run,), commands_of=(self.run,))

    def apply(self, unit: UnitOfWork) -> None:
        """Add the command to the inbox, unless an identical one is unread or the run has ended.

        Raises:
            RunNotFound: The run does not exist.
        """
        run = unit.runs.get(self.run)
        if run is None:
            raise RunNotFound
        if run.state.is_terminal or any(command.payload == self.payload for command in unit.inbox(run)):
            return
        incoming = arrived(unit, run, name=COMPLETED, payload=self.payload)
        turn.wake(unit, accept(unit, run, incoming))


class Refused(Exception):
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
    """Raised when another session of the same client now holds the call.

    No receipt is stored, because the other session may send the same command.
    """


def check_open(call: CallRow) -> None:
    if call.state.is_terminal or call.reserved_by:
        check_undecided(call)
        raise Refused(CommandOutcome.LATE, CallNotPending())


def check_undecided(call: CallRow | None) -> None:
    if call is not None and call.decision is not None:
        did = _DONE[call.decision.kind]
        raise Refused(
            CommandOutcome.LATE, AlreadyDecided(f"{call.tool_name} was already {did} by {call.decision.user_id}")
        )


def check_deadline(call: CallRow, now: datetime) -> None:
    if call.deadline_time is not None and call.deadline_time <= now:
        raise Refused(CommandOutcome.LATE, DeadlinePassed())
