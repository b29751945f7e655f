"""Converts conversations to and from chat-completions histories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pawl.agent.v1 import agent_pb2, conversation_pb2
from pawl.errors import InvalidHistory
from pawl.event.v1 import run_pb2

_ROLES: Final = {
    "user": conversation_pb2.HISTORY_ROLE_USER,
    "assistant": conversation_pb2.HISTORY_ROLE_ASSISTANT,
    "tool": conversation_pb2.HISTORY_ROLE_TOOL,
    "system": conversation_pb2.HISTORY_ROLE_SYSTEM,
    "developer": conversation_pb2.HISTORY_ROLE_SYSTEM,
}
_FAULTS_SHOWN_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that was sent: its run, and whether it entered a run that was already active."""

    response: agent_pb2.SendMessageResponse

    @property
    def run(self) -> run_pb2.Run:
        return self.response.run

    @property
    def run_id(self) -> str:
        return self.response.run.run_id

    @property
    def steered(self) -> bool:
        return self.response.steered


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

    Raises:
        InvalidHistory: The messages are malformed. The error lists up to 20 problems.
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


def chat_messages(messages: Iterable[conversation_pb2.HistoryMessage]) -> list[dict[str, Any]]:
    """Convert protobuf messages to chat-completions messages. This is the inverse of `history`.

    The format cannot mark a result as an error, so the content of such a result is an object with the key `error`.
    """
    return list(map(_chat, messages))


def _chat(message: conversation_pb2.HistoryMessage) -> dict[str, Any]:
    if message.role == conversation_pb2.HISTORY_ROLE_USER:
        return {"role": "user", "content": message.text}
    if message.role == conversation_pb2.HISTORY_ROLE_TOOL:
        content = _error(message) if message.is_error else message.text
        return {"role": "tool", "tool_call_id": message.call_id, "content": content}
    answer: dict[str, Any] = {"role": "assistant", "content": message.text or None}
    if message.calls:
        answer["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.tool_name, "arguments": call.arguments_json},
            }
            for call in message.calls
        ]
    return answer


def _error(message: conversation_pb2.HistoryMessage) -> str:
    """Return an error as the model receives it."""
    value = msgspec.json.decode(message.text)
    error = value if isinstance(value, dict) and "error" in value else {"error": value}
    return msgspec.json.encode({**error, "reason": message.error_reason}).decode()
