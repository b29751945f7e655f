"""Validates imported histories. Refuses everything that a strict model server would refuse.

Adjacent messages of the same role are allowed. They are merged for the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from pawl.agent_loop.loop.rules.assembly import ARGUMENTS_BYTES_MAX, is_json
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.checks import CONTROL, MESSAGE_BYTES_MAX, RESULT_BYTES_MAX
from pawl.agent_loop.loop.rules.message import Message, Role
from pawl.chassis import strict_json
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId
from pawl.errors import InvalidHistory, InvalidJson, TooLarge
from pawl.values import CallState

MESSAGES_MAX: Final = 1000
# Maximum number of calls per message.
CALLS_MAX: Final = 128
ID_CHARACTERS_MAX: Final = 256
FAULTS_SHOWN_MAX: Final = 20
_SHOWN_CHARACTERS: Final = 40
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_REASON: Final = re.compile(r"[A-Z0-9_]{1,64}")


class HistoryRole(StrEnum):
    USER = "USER"
    ASSISTANT = "ASSISTANT"
    TOOL = "TOOL"
    SYSTEM = "SYSTEM"
    UNSPECIFIED = "UNSPECIFIED"


class HistoryCall(msgspec.Struct, frozen=True, kw_only=True):
    call_id: str
    tool_name: str
    arguments_json: str


class HistoryMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message in a history. An assistant message may have `calls`.

    A tool message contains the result of `call_id`.
    """

    role: HistoryRole
    text: str = ""
    calls: tuple[HistoryCall, ...] = ()
    call_id: str = ""
    is_error: bool = False
    error_reason: str = ""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A reason to refuse a history. `message` is the message's position, counted from 1, or 0 for the whole history."""

    message: int
    text: str


def faults(history: Sequence[HistoryMessage]) -> Iterator[Fault]:
    """Yield a fault for everything that a strict model server would refuse, and for a final message from the user."""
    if not history:
        yield Fault(message=0, text="the history has no messages")
    elif history[0].role is not HistoryRole.USER:
        yield Fault(message=1, text="the first message must be from the user")
    if len(history) > MESSAGES_MAX:
        yield Fault(message=0, text=f"a history may have at most {MESSAGES_MAX} messages: import only the newest")
        return
    known: set[str] = set()
    for position, message in enumerate(history, 1):
        for text in (*_message_faults(message), *_id_faults(message, known)):
            yield Fault(message=position, text=text)
    yield from _result_faults(history)
    if history and history[-1].role is HistoryRole.USER:
        text = "the last message must not be from the user: send it after the import"
        yield Fault(message=len(history), text=text)


def check(history: Sequence[HistoryMessage]) -> None:
    """Validate the history.

    Raises:
        InvalidHistory: The history is invalid. The error lists up to 20 faults with their positions.
    """
    found = sorted(faults(history), key=lambda fault: fault.message)
    if not found:
        return
    shown = [f"message {fault.message}: {fault.text}" if fault.message else fault.text for fault in found]
    more = len(found) - FAULTS_SHOWN_MAX
    rest = f"; and {more} more" if more > 0 else ""
    positions = dict.fromkeys(str(fault.message) for fault in found[:FAULTS_SHOWN_MAX] if fault.message)
    raise InvalidHistory(
        "; ".join(shown[:FAULTS_SHOWN_MAX]) + rest, positions=",".join(positions), fault_count=len(found)
    )


def convert_history(
    history: Sequence[HistoryMessage], new_call_id: Callable[[], CallId]
) -> tuple[tuple[Message, ...], tuple[Call, ...]]:
    """Convert a validated history to messages and settled calls. The ledger sets the owner."""
    results = _results(history)
    messages: list[Message] = []
    calls: list[Call] = []
    round_ = 0
    for position, message in enumerate(history):
        if message.role is HistoryRole.TOOL:
            continue
        round_ += bool(message.calls)
        made = [
            _call(call, new_call_id(), results[position, call.call_id], round_, index)
            for index, call in enumerate(message.calls)
        ]
        calls += made
        messages.append(
            Message(
                role=Role.USER if message.role is HistoryRole.USER else Role.ASSISTANT,
                run_id=RunId(""),
                text=message.text,
                call_ids=tuple(call.call_id for call in made),
                imported=True,
            )
        )
    return tuple(messages), tuple(calls)


def _results(history: Sequence[HistoryMessage]) -> dict[tuple[int, str], HistoryMessage]:
    """Return each call's result, keyed by call id and by the position of the message that made the call."""
    asked, results = 0, dict[tuple[int, str], HistoryMessage]()
    for position, message in enumerate(history):
        if message.role is HistoryRole.TOOL:
            results[asked, message.call_id] = message
        else:
            asked = position
    return results


def _call(call: HistoryCall, call_id: CallId, result: HistoryMessage, round_: int, index: int) -> Call:
    arguments = strict_json.loads(call.arguments_json.encode(), bytes_max=ARGUMENTS_BYTES_MAX)
    return Call(
        store_id=StoreId(""),
        conversation_id=ConversationId(""),
        run_id=RunId(""),
        call_id=call_id,
        round=round_,
        index=index,
        tool_name=call.tool_name,
        state=CallState.FAILED if result.is_error else CallState.SUCCEEDED,
        provider_call_id=call.call_id,
        arguments_json=strict_json.dumps_canonical(arguments),
        proposed_arguments=call.arguments_json,
        result=CallResult(
            content_json=_content_json(result.text),
            is_error=result.is_error,
            error_reason=(result.error_reason or "TOOL_ERROR") if result.is_error else "",
        ),
        imported=True,
    )


def _content_json(text: str) -> bytes:
    data = text.encode()
    try:
        strict_json.loads(data, bytes_max=RESULT_BYTES_MAX)
    except (InvalidJson, TooLarge):
        return msgspec.json.encode(text)
    return data


def _message_faults(message: HistoryMessage) -> Iterator[str]:
    is_assistant = message.role is HistoryRole.ASSISTANT
    bytes_max = MESSAGE_BYTES_MAX if message.role is HistoryRole.USER else RESULT_BYTES_MAX
    match message.role:
        case HistoryRole.SYSTEM:
            yield (
                "system and developer messages are not imported, because they could contradict the agent's "
                "instructions: remove this message"
            )
        case HistoryRole.UNSPECIFIED:
            yield "its role must be user, assistant or tool"
        case HistoryRole.USER:
            if not message.text.strip():
                yield "the user message is empty"
        case HistoryRole.ASSISTANT:
            if not (message.text.strip() or message.calls):
                yield "the assistant message has neither text nor calls"
        case HistoryRole.TOOL:
            if not message.call_id:
                yield "a tool message must name its call"
    if message.calls and not is_assistant:
        yield "only assistant messages may have calls"
    if message.call_id and message.role is not HistoryRole.TOOL:
        yield "only tool messages may name a call"
    if message.error_reason and not message.is_error:
        yield "error_reason requires is_error"
    if message.error_reason and not _REASON.fullmatch(message.error_reason):
        yield "error_reason must have at most 64 capital letters, digits and _"
    yield from _text_faults(message.text, "the text", bytes_max)
    if len(message.calls) > CALLS_MAX:
        yield f"a message may have at most {CALLS_MAX} calls, got {len(message.calls)}"
    for call in message.calls[:CALLS_MAX]:
        yield from _call_faults(call)


def _text_faults(text: str, name: str, bytes_max: int) -> Iterator[str]:
    if len(text.encode()) > bytes_max:
        yield f"{name} is over the limit of {bytes_max} bytes"
    if (found := CONTROL.search(text)) is not None:
        yield f"{name} must not contain the control character U+{ord(found.group()):04X}"


def _call_faults(call: HistoryCall) -> Iterator[str]:
    name = f"call {_shown(call.call_id)}"
    if not call.call_id or len(call.call_id) > ID_CHARACTERS_MAX:
        yield f"{name}: an id must have 1 to {ID_CHARACTERS_MAX} characters"
    if CONTROL.search(call.call_id):
        yield f"{name}: the id has a control character"
    if not _NAME.fullmatch(call.tool_name):
        yield f"{name}: a tool name must have 1 to 64 letters, digits, _ and -"
    if not is_json(call.arguments_json, dict):
        size = f"at most {ARGUMENTS_BYTES_MAX} bytes"
        yield f"{name}: the arguments must be a strict JSON object of {size} ({{}} for none)"


def _id_faults(message: HistoryMessage, known: set[str]) -> Iterator[str]:
    """Yield a fault for each call id that is in `known`, and add new ids to `known`."""
    for call in message.calls:
        if call.call_id in known:
            yield f"call {_shown(call.call_id)}: another call has the same id"
        known.add(call.call_id)


def _result_faults(history: Sequence[HistoryMessage]) -> Iterator[Fault]:
    """Yield a fault for each missing or misplaced result. Each call needs one result, right after its message."""
    open_ids: dict[str, None] = {}
    answered: set[str] = set()
    asked_at = 0
    for position, message in enumerate(history, 1):
        if message.role is not HistoryRole.TOOL:
            yield from _unanswered(asked_at, open_ids)
            open_ids, answered, asked_at = dict.fromkeys(call.call_id for call in message.calls), set(), position
        elif message.call_id in open_ids:
            del open_ids[message.call_id]
            answered.add(message.call_id)
        elif message.call_id in answered:
            yield Fault(message=position, text=f"call {_shown(message.call_id)} already has a result")
        elif message.call_id:
            yield Fault(
                message=position,
                text=f"a result for call {_shown(message.call_id)}, which is not in the assistant message before it",
            )
    yield from _unanswered(asked_at, open_ids)


def _unanswered(asked_at: int, open_ids: dict[str, None]) -> Iterator[Fault]:
    for call_id in open_ids:
        yield Fault(message=asked_at, text=f"call {_shown(call_id)} has no result right after it")


def _shown(call_id: str) -> str:
    return ascii(call_id[:_SHOWN_CHARACTERS])
