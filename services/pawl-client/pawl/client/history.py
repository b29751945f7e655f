"""Converts conversations from and to chat-completions histories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pawl.agent.v1 import conversation_pb2
from pawl.errors import InvalidHistory
from pawl.event.v1 import call_pb2, message_pb2

_ROLES: Final = {
    "user": conversation_pb2.HISTORY_ROLE_USER,
    "assistant": conversation_pb2.HISTORY_ROLE_ASSISTANT,
    "tool": conversation_pb2.HISTORY_ROLE_TOOL,
    "system": conversation_pb2.HISTORY_ROLE_SYSTEM,
    "developer": conversation_pb2.HISTORY_ROLE_SYSTEM,
}
_FAULTS_SHOWN_MAX: Final = 20


class _ChatText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _ChatFunction(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class _ChatCall(msgspec.Struct):
    function: _ChatFunction
    id: str = ""


class _ChatMessage(msgspec.Struct):
    role: Any = None
    content: str | list[_ChatText] | None = None
    refusal: str | None = None
    tool_calls: list[_ChatCall] | None = None
    tool_call_id: str | None = None


def history(messages: Sequence[Mapping[str, Any]]) -> list[conversation_pb2.HistoryMessage]:
    """Convert chat-completions messages to protobuf messages. The service validates their meaning.

    Multiple text parts in one message are joined by a blank line.

    Raises: InvalidHistory: The messages are malformed. The error lists up to 20 problems.
    """
    read: list[conversation_pb2.HistoryMessage] = []
    faults: list[str] = []
    if isinstance(messages, Mapping | str | bytes):
        raise InvalidHistory("the history must be a list of messages", fault_count=1)
    for position, message in enumerate(messages, 1):
        try:
            read.append(_message(msgspec.convert(message, _ChatMessage)))
        except ValueError as error:
            faults.append(f"message {position}: {error}")
    if faults:
        more = len(faults) - _FAULTS_SHOWN_MAX
        rest = f"; and {more} more" if more > 0 else ""
        raise InvalidHistory("; ".join(faults[:_FAULTS_SHOWN_MAX]) + rest, fault_count=len(faults))
    return read


def _message(message: _ChatMessage) -> conversation_pb2.HistoryMessage:
    content = message.content or ()
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    calls = [
        conversation_pb2.HistoryCall(
            call_id=call.id, tool_name=call.function.name, arguments_json=call.function.arguments
        )
        for call in message.tool_calls or ()
    ]
    return conversation_pb2.HistoryMessage(
        role=_ROLES.get(str(message.role), conversation_pb2.HISTORY_ROLE_UNSPECIFIED),
        text="\n\n".join(texts) or message.refusal or "",
        calls=calls,
        call_id=message.tool_call_id or "",
    )


def chat_messages(messages: Sequence[message_pb2.Message], calls: Mapping[str, call_pb2.Call]) -> list[dict[str, Any]]:
    """Convert a conversation's messages to chat-completions messages. `calls` maps ids to the messages' calls.

    This is the inverse of `history`. Servers that validate histories accept the messages, and `import_conversation`
    imports them. Each call has one result. If a call has not ended, its result is an error. Attachments become
    placeholders. Reports of background jobs become user messages. If old messages were deleted, the summary that
    replaced them comes first.
    """
    is_cut = bool(messages) and messages[0].number > 1
    summary = next((each for each in reversed(messages) if each.role == message_pb2.ROLE_SUMMARY), None)
    replaced_to = summary.summarised_to_number if summary is not None and is_cut else 0
    read: list[dict[str, Any]] = []
    if summary is not None and is_cut:
        read.append({"role": "user", "content": f"Summary of the conversation so far:\n\n{summary.text}"})
    for message in messages:
        if message.role != message_pb2.ROLE_SUMMARY and message.number > replaced_to:
            read += _chat(message, calls)
    return read


def _chat(message: message_pb2.Message, calls: Mapping[str, call_pb2.Call]) -> list[dict[str, Any]]:
    if message.role == message_pb2.ROLE_NOTICE:
        text = message.notices_json.decode() or "[]"
        return [{"role": "user", "content": f"Background jobs report: {text}"}]
    if message.role == message_pb2.ROLE_USER:
        count = sum(not part.HasField("text") for part in message.parts)
        texts = [message.text, *(["[an attachment]"] * count)]
        return [{"role": "user", "content": "\n\n".join(filter(None, texts))}]
    known = [calls[call_id] for call_id in message.call_ids if call_id in calls]
    text = message.text or message.refusal
    if not text and not known:
        return []
    answer: dict[str, Any] = {"role": "assistant", "content": text or None}
    if known:
        answer["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.tool_name, "arguments": call.arguments_json.decode()},
            }
            for call in known
        ]
    return [answer, *({"role": "tool", "tool_call_id": call.call_id, "content": _content(call)} for call in known)]


def _content(call: call_pb2.Call) -> str:
    """Return a call's result as the model receives it."""
    if not call.HasField("result"):
        return '{"error":"The call has not ended."}'
    content = call.result.content_json.decode()
    if not call.result.is_error:
        return content
    value = msgspec.json.decode(content)
    error = value if isinstance(value, dict) and "error" in value else {"error": value}
    return msgspec.json.encode({**error, "reason": call.result.error_reason}).decode()
