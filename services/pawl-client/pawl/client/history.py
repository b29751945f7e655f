"""Converts chat-completions histories for ImportConversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from pawl.agent.v1 import conversation_pb2
from pawl.errors import InvalidHistory

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
    """Convert chat-completions messages to the contract's messages. The service validates their meaning.

    Multiple text parts in one message are joined with an empty line.

    Raises:
        InvalidHistory: The messages are malformed; the error message lists up to 20 faults.
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
