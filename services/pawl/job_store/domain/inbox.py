"""The inbox of a run: commands that its owner has yet to act on.

It is bounded, whether anybody reads it or not. What settles or decides a call comes
once for each open call, and one stop is all that is kept; messages and top-ups are
counted, and so are receipts of commands that changed nothing. A message counts until
it stands in the conversation, wherever its owner keeps it meanwhile.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.errors import PawlError, QueueFull
from pawl.job_store.domain.rows import CommandRow, RunRow
from pawl.job_store.domain.states import CommandOutcome
from pawl.job_store.domain.unit_of_work import UnitOfWork

STEER: Final = "steer"
CANCEL: Final = "cancel"
TOP_UP: Final = "top_up"
AGENT_ENDED: Final = "agent_ended"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Most messages, and most top-ups, that wait for the owner of a run, and most bytes of text of those messages.

    `idle_receipts_max` is the most receipts that a run keeps of commands that changed nothing.
    """

    commands_max: int = 100
    bytes_max: int = 1024 * 1024
    idle_receipts_max: int = 100


LIMITS: Final = Limits()


class IncomingCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command as it arrives. `payload` is opaque: what the owner of the run will read.

    `call_id` is the call that it settles or decides; empty if none. `text_bytes` is
    the size of a message.
    """

    command_id: str
    user_id: str
    name: str
    fingerprint: bytes
    payload: bytes
    call_id: str = ""
    text_bytes: int = 0


def accept_message(unit: UnitOfWork, run: RunRow, incoming: IncomingCommand, limits: Limits) -> RunRow:
    """Put a message into the inbox of `run`; returns the run.

    Raises:
        QueueFull: too many wait there.
    """
    size_bytes = run.steer_bytes_waiting + incoming.text_bytes
    if run.steers_waiting >= limits.commands_max or size_bytes > limits.bytes_max:
        waiting = f"{run.steers_waiting} messages with {run.steer_bytes_waiting} bytes wait to be read by this run"
        raise QueueFull(f"{waiting}: send this one again when it has read some, or queue it")
    run = replace(run, steers_waiting=run.steers_waiting + 1, steer_bytes_waiting=size_bytes)
    return accept(unit, run, incoming)


def accept_top_up(unit: UnitOfWork, run: RunRow, incoming: IncomingCommand, limits: Limits) -> RunRow:
    """Put a top-up into the inbox of `run`; returns the run.

    Raises:
        QueueFull: too many wait there.
    """
    if sum(command.name == TOP_UP for command in unit.inbox(run)) >= limits.commands_max:
        raise QueueFull(f"{limits.commands_max} top-ups wait to be read by this run: send this one again later")
    return accept(unit, run, incoming)


def accept(unit: UnitOfWork, run: RunRow, incoming: IncomingCommand, *, consumed: bool = False) -> RunRow:
    """Put a command into the inbox of `run`, or only its receipt if it is `consumed` at once; returns the run."""
    row = _row(unit, run, incoming)
    if consumed:
        row = replace(row, payload=b"", consumed=True)
    return _put(unit, run, row)


def refuse(
    unit: UnitOfWork,
    run: RunRow,
    incoming: IncomingCommand,
    limits: Limits,
    *,
    outcome: CommandOutcome,
    error: PawlError,
) -> RunRow:
    """Remember that a command was refused, so that it is refused for ever, unless too many were; returns the run."""
    row = replace(_row(unit, run, incoming), outcome=outcome, reason=error.reason, message=error.message)
    return _put_idle(unit, run, row, limits)


def accept_idle(unit: UnitOfWork, run: RunRow, incoming: IncomingCommand, limits: Limits) -> RunRow:
    """Remember a command that asked for what was done already, unless too many did; returns the run."""
    return _put_idle(unit, run, _row(unit, run, incoming), limits)


def _put_idle(unit: UnitOfWork, run: RunRow, row: CommandRow, limits: Limits) -> RunRow:
    """Keep a receipt that nobody has to read. Without it the same command is judged anew when it comes again."""
    if run.idle_receipts >= limits.idle_receipts_max:
        return run
    run = replace(run, idle_receipts=run.idle_receipts + 1)
    return _put(unit, run, replace(row, payload=b"", consumed=True))


def _row(unit: UnitOfWork, run: RunRow, incoming: IncomingCommand) -> CommandRow:
    return CommandRow(
        store_id=run.store_id,
        run_id=run.run_id,
        command_id=incoming.command_id,
        number=run.command_count + 1,
        user_id=incoming.user_id,
        time=unit.now,
        name=incoming.name,
        call_id=incoming.call_id,
        fingerprint=incoming.fingerprint,
        outcome=CommandOutcome.ACCEPTED,
        reason="",
        message="",
        payload=incoming.payload,
        consumed=False,
    )


def _put(unit: UnitOfWork, run: RunRow, row: CommandRow) -> RunRow:
    unit.put_command(row)
    return unit.put_run(replace(run, command_count=row.number))
