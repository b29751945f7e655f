"""Splits responses that could exceed the size of a gRPC message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from google.protobuf.message import Message as ProtoMessage

from pawl.chassis.ids import CallId, RunId
from pawl.chassis.rpc.parts import in_parts
from pawl.event.v1 import message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.ledger.reading import Loaded, PendingNotices
from pawl.job_store.ledger.rpc import messages, own_tools
from pawl.job_store.ledger.rules import prefix
from pawl.job_store.ledger.rules.prefix import HistoryPrefix
from pawl.job_store.ledger.rules.rows import CommandRow

# An entry that would make a part larger than this starts a new part.
PART_BYTES_MAX: Final = 1024 * 1024

# Maximum total size of the images loaded with a run. The newest are kept.
IMAGES_BYTES_MAX: Final = 8 * 1024 * 1024

# agent-loop's failure reason if the model server rejects the request.
_PROVIDER_REFUSED: Final = "PROVIDER_REFUSED"


def of_run(loaded: Loaded) -> Iterator[ledger_pb2.LoadRunResponse]:
    """Yield the loaded run in parts. Only the first part has fields other than messages, calls and commands."""
    first = ledger_pb2.LoadRunResponse(
        run=messages.run_for_service(loaded.run),
        loop_state=loaded.loop_state,
        now=messages.timestamp(loaded.time),
        own_tools=own_tools.of_run(loaded.run),
        notices=map(messages.notice, loaded.pending_notices.notices),
        open_job_count=loaded.pending_notices.open_jobs,
        jobs_below_count=loaded.pending_notices.jobs_below,
        shared_tokens_left=loaded.shared_tokens_left,
        continues_known=loaded.known is not None,
    )
    history = [messages.message_for_worker(row, loaded.user_id, loaded.run.user_id) for row in loaded.messages]
    _without_refused_images(history, loaded.failures)
    _without_old_images(history, IMAGES_BYTES_MAX)
    if (found := _prefix(loaded, history)) is not None:
        first.prefix.CopyFrom(messages.PREFIX.write(found))
    asked = {call_id for message in history for call_id in message.call_ids}
    calls = (
        messages.call(row, omitted_bytes=loaded.omitted_bytes[row.call_id])
        for row in loaded.calls
        if row.call_id in asked or row.run_id == loaded.run.run_id
    )
    commands = map(messages.command, loaded.commands)
    entries = chain(_named("messages", history), _named("calls", calls), _named("commands", commands))
    part = first
    for taken in in_parts(entries, lambda named: named[1].ByteSize(), size_max=PART_BYTES_MAX):
        for field, entry in taken:
            getattr(part, field).append(entry)
        yield part
        part = ledger_pb2.LoadRunResponse()
    if part is first:
        yield first


def _prefix(loaded: Loaded, history: Sequence[message_pb2.Message]) -> HistoryPrefix | None:
    """Return the prefix that a worker may cache, or None if it may not cache anything. See `rules.prefix`."""
    run = loaded.run
    # A job is loaded only with the calls of its last iteration.
    if run.reports_to or any(loaded.omitted_bytes.values()):
        return None
    ended = {call.call_id for call in loaded.calls if call.state.is_terminal}
    changing = {run.run_id} | {
        RunId(message.run_id)
        for message in history
        if message.user_id != run.user_id
        or any(part.HasField("image") for part in message.parts)
        or not ended.issuperset(map(CallId, message.call_ids))
    }
    return prefix.grown(loaded.known, loaded.messages, loaded.calls, changing)


def of_inbox(rows: Iterable[CommandRow], pending: PendingNotices) -> Iterator[ledger_pb2.ListCommandsResponse]:
    """Yield commands in parts. Only the first part has the notices."""
    parts = in_parts(map(messages.command, rows), ledger_pb2.Command.ByteSize, size_max=PART_BYTES_MAX)
    yield ledger_pb2.ListCommandsResponse(
        commands=next(parts, []),
        notices=map(messages.notice, pending.notices),
        open_job_count=pending.open_jobs,
        jobs_below_count=pending.jobs_below,
    )
    for part in parts:
        yield ledger_pb2.ListCommandsResponse(commands=part)


def _named(field: str, entries: Iterable[ProtoMessage]) -> Iterator[tuple[str, ProtoMessage]]:
    return ((field, entry) for entry in entries)


def _without_refused_images(history: Sequence[message_pb2.Message], failures: Mapping[RunId, bytes]) -> None:
    """Remove images that the provider has refused. If they stayed, it would refuse all later requests too.

    This applies to runs that failed with PROVIDER_REFUSED and have no answer. For such a run, the images of its own
    message are removed or, if it has none, all earlier images.
    """
    answered = {message.run_id for message in history if message.role == message_pb2.ROLE_ASSISTANT}
    refused = {
        run_id
        for run_id, failure in failures.items()
        if run_id not in answered and run_pb2.Run.FromString(failure).failure.reason == _PROVIDER_REFUSED
    }
    with_images = {message.run_id for message in history if any(part.HasField("image") for part in message.parts)}
    leaves_all = False
    for message in reversed(history):
        is_refused = message.run_id in refused
        leaves_all = leaves_all or (is_refused and message.run_id not in with_images)
        for part in message.parts:
            if part.HasField("image") and (is_refused or leaves_all):
                messages.leave_out(part)


def _without_old_images(history: Sequence[message_pb2.Message], bytes_max: int) -> None:
    left = bytes_max
    for part in (part for message in reversed(history) for part in reversed(message.parts)):
        if part.HasField("image"):
            left -= len(part.image.data)
            if left < 0:
                messages.leave_out(part)
