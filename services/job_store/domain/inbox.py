"""The inbox of a run: commands that its owner has yet to act on."""

from __future__ import annotations

from datetime import datetime
from typing import Final

import msgspec
from msgspec.structs import replace

from services.errors import PawlError
from services.job_store.domain.book import Book
from services.job_store.domain.rows import CommandRow, RunRow
from services.job_store.domain.states import CommandOutcome

STEER: Final = "steer"
CANCEL: Final = "cancel"
TOP_UP: Final = "top_up"
AGENT_ENDED: Final = "agent_ended"


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A command as it arrives. `payload` is opaque: what the owner of the run will read.

    `call_id` is the call that it settles or decides; empty if none.
    """

    command_id: str
    user_id: str
    name: str
    fingerprint: bytes
    payload: bytes
    call_id: str = ""


def accept(book: Book, run: RunRow, letter: Letter, *, now: datetime, consumed: bool = False) -> RunRow:
    """Put a command into the inbox of `run`, or only its receipt if it is `consumed` at once; returns the run."""
    row = _row(run, letter, now)
    if consumed:
        row = replace(row, payload=b"", consumed=True)
    return _put(book, run, row)


def refuse(
    book: Book, run: RunRow, letter: Letter, *, outcome: CommandOutcome, error: PawlError, now: datetime
) -> RunRow:
    """Remember that a command was refused, so that it is refused for ever; returns the run."""
    row = _row(run, letter, now)
    row = replace(row, outcome=outcome, reason=error.reason, message=error.message, payload=b"", consumed=True)
    return _put(book, run, row)


def _row(run: RunRow, letter: Letter, now: datetime) -> CommandRow:
    return CommandRow(
        store_id=run.store_id,
        run_id=run.run_id,
        command_id=letter.command_id,
        number=run.command_count + 1,
        user_id=letter.user_id,
        time=now,
        name=letter.name,
        call_id=letter.call_id,
        fingerprint=letter.fingerprint,
        outcome=CommandOutcome.ACCEPTED,
        reason="",
        message="",
        payload=letter.payload,
        consumed=False,
    )


def _put(book: Book, run: RunRow, row: CommandRow) -> RunRow:
    book.put_command(row)
    return book.put_run(replace(run, command_count=row.number))
