"""Parts of what may be larger than a message of gRPC."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

from google.protobuf.message import Message as ProtoMessage

from pawl.job.v1 import ledger_pb2
from pawl.job_store.app.reading import Loaded
from pawl.job_store.domain.rows import CommandRow
from pawl.job_store.rpc import messages

PART_BYTES_MAX: Final = 1024 * 1024
"""A part that has an entry takes no further one that makes it larger than this."""


def of_run(loaded: Loaded) -> Iterator[ledger_pb2.LoadRunResponse]:
    """Yield a loaded run; at least one part, and that has all that is not repeated."""
    first = ledger_pb2.LoadRunResponse(
        run=messages.run(loaded.run), loop_state=loaded.loop_state, now=messages.timestamp(loaded.time)
    )
    history = [messages.message(row) for row in loaded.messages]
    asked = {call_id for message in history for call_id in message.call_ids}
    calls = (
        messages.call(row, omitted_bytes=loaded.omitted_bytes[row.call_id])
        for row in loaded.calls
        if row.call_id in asked or row.run_id == loaded.run.run_id
    )
    commands = map(messages.command, loaded.commands)
    part, size_bytes = first, 0
    for field, entry in chain(_named("messages", history), _named("calls", calls), _named("commands", commands)):
        size_bytes += entry.ByteSize()
        if size_bytes > PART_BYTES_MAX and size_bytes > entry.ByteSize():
            yield part
            part, size_bytes = ledger_pb2.LoadRunResponse(), entry.ByteSize()
        getattr(part, field).append(entry)
    yield part


def of_inbox(rows: Iterable[CommandRow]) -> Iterator[ledger_pb2.ListCommandsResponse]:
    """Yield commands; at least one part."""
    part, size_bytes = ledger_pb2.ListCommandsResponse(), 0
    for command in map(messages.command, rows):
        size_bytes += command.ByteSize()
        if size_bytes > PART_BYTES_MAX and part.commands:
            yield part
            part, size_bytes = ledger_pb2.ListCommandsResponse(), command.ByteSize()
        part.commands.append(command)
    yield part


def _named(field: str, entries: Iterable[ProtoMessage]) -> Iterator[tuple[str, ProtoMessage]]:
    return ((field, entry) for entry in entries)
