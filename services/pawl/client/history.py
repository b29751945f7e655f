"""Histories of chat completions, as JSON has them, for ImportConversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

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


def history(messages: Sequence[Mapping[str, Any]]) -> list[conversation_pb2.HistoryMessage]:
    """Return messages of chat completions as the contract has them; the service checks what they say.

    A content of several texts becomes one, with an empty line between them.

    Raises:
        InvalidHistory: they do not have this form; the message lists where, up to 20 times.
    """
    read: list[conversation_pb2.HistoryMessage] = []
    faults: list[str] = []
    if isinstance(messages, Mapping | str | bytes):
        raise InvalidHistory("it is no list: give the list of messages alone", fault_count=1)
    for position, message in enumerate(messages, 1):
        try:
            read.append(_message(message))
        except (ValueError, TypeError) as error:
            faults.append(f"message {position}: {error}")
    if faults:
        more = len(faults) - _FAULTS_SHOWN_MAX
        rest = f"; and {more} more" if more > 0 else ""
        raise InvalidHistory("; ".join(faults[:_FAULTS_SHOWN_MAX]) + rest, fault_count=len(faults))
    return read


def _message(message: object) -> conversation_pb2.HistoryMessage:
    if not isinstance(message, Mapping):
        raise TypeError("it is no object")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise TypeError("tool_calls is no list")
    return conversation_pb2.HistoryMessage(
        role=_ROLES.get(str(message.get("role")), conversation_pb2.HISTORY_ROLE_UNSPECIFIED),
        text="\n\n".join(_texts(message.get("content"))) or _text(message, "refusal"),
        calls=map(_call, calls),
        call_id=_text(message, "tool_call_id"),
    )


def _texts(content: object) -> Iterator[str]:
    if content is None or isinstance(content, str):
        yield content or ""
        return
    if not isinstance(content, Sequence):
        raise TypeError("content is neither a text nor a list of parts")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise ValueError("only parts of the type text can be imported")
        yield _text(part, "text")


def _call(call: object) -> conversation_pb2.HistoryCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise TypeError("a call has an id and a function")
    return conversation_pb2.HistoryCall(
        call_id=_text(call, "id"), tool_name=_text(function, "name"), arguments_json=_text(function, "arguments")
    )


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{name} is no text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} has half of a surrogate pair") from None
    return value
