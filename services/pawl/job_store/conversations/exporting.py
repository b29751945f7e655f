"""Converts messages and calls to a history that ImportConversation accepts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from pawl.agent.v1 import conversation_pb2 as pb
from pawl.event.v1 import call_pb2, message_pb2
from pawl.job_store.ledger.store.run_lists import PAGE_BYTES_MAX

_USER_BYTES_MAX: Final = 256 * 1024
_TEXT_BYTES_MAX: Final = 1024 * 1024
_NAME_CHARACTERS_MAX: Final = 64
_NOT_ENDED: Final = call_pb2.CallResult(
    content_json=b'{"error":"The call has not ended."}', is_error=True, error_reason="OUTCOME_UNKNOWN"
)
# Control characters other than tab, line feed and carriage return.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_-]")


def put(
    response: pb.ExportConversationResponse,
    messages: Sequence[message_pb2.Message],
    calls: Mapping[str, call_pb2.Call],
    *,
    cut_at: str = "",
) -> int:
    """Add messages and their calls to a page until it reaches about 2 MiB. At least one message is always added.

    Return the number of the last message added. `cut_at` is the id of the last call that was read, if there are more
    calls.
    """
    last_number = size_bytes = 0
    for message in messages:
        added = list(history([message], calls))
        size_bytes += sum(each.ByteSize() for each in added)
        if last_number and (size_bytes > PAGE_BYTES_MAX or cut_at in message.call_ids):
            break
        response.messages.extend(added)
        last_number = message.number
        if cut_at in message.call_ids:
            break
    return last_number


def history(messages: Iterable[message_pb2.Message], calls: Mapping[str, call_pb2.Call]) -> Iterator[pb.HistoryMessage]:
    """Yield the history without summaries. `calls` maps call ids to the calls that the reader may see."""
    for message in messages:
        match message.role:
            case message_pb2.ROLE_USER:
                count = sum(not part.HasField("text") for part in message.parts)
                yield _of_user("\n\n".join(filter(None, (message.text, *(["[an attachment]"] * count)))))
            case message_pb2.ROLE_NOTICE:
                yield _of_user(f"Background jobs report: {message.notices_json.decode() or '[]'}")
            case message_pb2.ROLE_ASSISTANT:
                yield from _answer(message, [calls[call_id] for call_id in message.call_ids if call_id in calls])


def summary(text: str) -> pb.HistoryMessage:
    """Return the user message that replaces deleted messages."""
    return _of_user(f"Summary of the conversation so far:\n\n{text}" if text else "Earlier messages were deleted.")


def _of_user(text: str) -> pb.HistoryMessage:
    plain = _plain(text, _USER_BYTES_MAX)
    return pb.HistoryMessage(role=pb.HISTORY_ROLE_USER, text=plain if plain.strip() else "[empty]")


def _answer(message: message_pb2.Message, calls: list[call_pb2.Call]) -> Iterator[pb.HistoryMessage]:
    text = _plain(message.text or message.refusal, _TEXT_BYTES_MAX)
    if not text.strip() and not calls:
        return
    requested = [
        pb.HistoryCall(call_id=_id(call), tool_name=_name(call.tool_name), arguments_json=_arguments(call))
        for call in calls
    ]
    yield pb.HistoryMessage(role=pb.HISTORY_ROLE_ASSISTANT, text=text, calls=requested)
    yield from map(_result, calls)


def _result(call: call_pb2.Call) -> pb.HistoryMessage:
    result = call.result if call.HasField("result") else _NOT_ENDED
    return pb.HistoryMessage(
        role=pb.HISTORY_ROLE_TOOL,
        call_id=_id(call),
        text=result.content_json.decode(),
        is_error=result.is_error,
        error_reason=(result.error_reason or "TOOL_ERROR") if result.is_error else "",
    )


def _id(call: call_pb2.Call) -> str:
    return call.provider_call_id if call.imported else call.call_id


def _name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name.replace(".", "__"))[:_NAME_CHARACTERS_MAX] or "_"


def _arguments(call: call_pb2.Call) -> str:
    arguments = call.arguments_json.decode()
    return arguments if arguments.startswith("{") else "{}"


def _plain(text: str, bytes_max: int) -> str:
    return _CONTROL.sub("", text).encode()[:bytes_max].decode(errors="ignore")
