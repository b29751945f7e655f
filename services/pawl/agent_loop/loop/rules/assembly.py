"""Assembles a model's answer from the pieces of its stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, assert_never

import msgspec

from pawl.agent_loop.model import fields
from pawl.agent_loop.model.request import (
    CUT_OFF,
    CallPiece,
    Finished,
    Piece,
    ProviderState,
    ReasoningPiece,
    RefusalPiece,
    Sent,
    TextPiece,
    UsageReport,
)
from pawl.chassis import strict_json
from pawl.chassis.strict_json import storable
from pawl.errors import InvalidJson, TooLarge

# Limit for one call.
ARGUMENTS_BYTES_MAX: Final = 256 * 1024
_decoder: Final = json.JSONDecoder()


def is_json(arguments: str, kind: type = object) -> bool:
    """Return whether the arguments are strict JSON of this type and within the size limit."""
    try:
        return isinstance(strict_json.loads(arguments.encode(), bytes_max=ARGUMENTS_BYTES_MAX), kind)
    except (InvalidJson, TooLarge):
        return False


def _joined_arguments(fragments: Sequence[str]) -> str:
    """Join the fragments. If the result is not a JSON object, try other ways of combining them.

    Some servers repeat all arguments in each fragment, send `{}` first, or add text after the object.
    """
    joined = storable("".join(fragments))
    if is_json(joined):
        return joined
    return next((reading for reading in _readings(fragments, joined) if is_json(reading, dict)), joined)


def _readings(fragments: Sequence[str], joined: str) -> Iterator[str]:
    last = fragments[-1] if fragments else ""
    if all(last.startswith(fragment) or fragment == "{}" for fragment in fragments):
        yield storable(last)
    yield joined.removeprefix("{}")
    with suppress(ValueError, RecursionError):
        end = _decoder.raw_decode(joined[:ARGUMENTS_BYTES_MAX])[1]
        if not joined.startswith("{}") and "{" not in joined[end:]:  # Invalid arguments must not become an empty one.
            yield joined[:end]


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A complete answer, or the part that was received before the stream broke off."""

    text: str
    reasoning: str
    # Calls as the model wrote them. The arguments may be incomplete or invalid JSON.
    calls: tuple[CallPiece, ...]
    refusal: str
    # A JSON object of extra fields to send back with the message and its calls; empty if there are none.
    provider_state_json: bytes
    usage: UsageReport
    # Empty if the answer was cut off.
    finish_reason: str
    # True if the unknown fields were too large and therefore dropped.
    fields_left_out: bool = False
    sent: Sent = msgspec.field(default_factory=Sent)

    @property
    def cut_off(self) -> bool:
        """True if the answer was cut off at the model's output limit."""
        return self.finish_reason.lower() in CUT_OFF

    @property
    def empty(self) -> bool:
        return not (self.text.strip() or self.refusal.strip() or self.calls)


@dataclass(slots=True, kw_only=True)
class _OpenCall:
    index: int | None
    provider_call_id: str
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    fields: fields.Fields = field(default_factory=fields.Fields)


class Assembly:
    """Assembles the pieces of a stream into an answer.

    Fragments with the same id belong to one call. Fragments without an id are matched by index, and fragments without
    either belong to the call that started last. A new id starts a new call even if its index is in use, because some
    servers send 0 for every call. A new id with only arguments continues the call at its index, because some servers
    generate an id per fragment.

    Calls are sorted by index if all of them have one, and otherwise by the order in which they started. `names` maps
    the model's tool names to the real names.
    """

    def __init__(self, names: Mapping[str, str] = MappingProxyType({})) -> None:
        self._names = names
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._calls: list[_OpenCall] = []
        self._fields = fields.Fields()
        self._fields_bytes = 0
        self._usage = UsageReport()
        self._finish_reason = ""
        self._sent = Sent()

    def add(self, piece: Piece) -> Piece:
        """Add `piece`, and return it in the form that watchers receive.

        A `CallPiece` gets the call's position in the answer as `index`. Other pieces are unchanged.
        """
        match piece:
            case TextPiece():
                self._text.append(piece.text)
            case ReasoningPiece():
                self._reasoning.append(piece.text)
            case RefusalPiece():
                self._refusal.append(piece.text)
            case CallPiece():
                return self._add_call(piece)
            case ProviderState():
                self._add_fields(self._fields, piece.fields_json)
            case UsageReport():
                self._usage = piece
            case Finished():
                self._finish_reason = piece.reason
            case Sent():
                self._sent = piece
            case _:
                assert_never(piece)
        return piece

    @property
    def usage(self) -> UsageReport:
        return self._usage

    def answer(self) -> ModelAnswer:
        calls = self._calls
        if all(call.index is not None for call in calls):
            calls = sorted(calls, key=lambda call: call.index or 0)
        left_out = self._fields_bytes > fields.BYTES_MAX
        return ModelAnswer(
            text=storable("".join(self._text)),
            reasoning=storable("".join(self._reasoning)),
            calls=tuple(
                CallPiece(
                    call_id=call.provider_call_id,
                    name=self._names.get(call.name, call.name),
                    arguments=_joined_arguments(call.arguments),
                )
                for call in calls
            ),
            refusal=storable("".join(self._refusal)),
            provider_state_json=b""
            if left_out
            else fields.with_calls(self._fields.json(), (call.fields.json() for call in calls)),
            usage=self._usage,
            finish_reason=self._finish_reason,
            fields_left_out=left_out,
            sent=self._sent,
        )

    def _add_fields(self, to: fields.Fields, fields_json: bytes) -> None:
        self._fields_bytes += len(fields_json)
        if self._fields_bytes <= fields.BYTES_MAX:
            to.add(fields_json)

    def _add_call(self, piece: CallPiece) -> CallPiece:
        position = self._position(piece)
        if position is None:
            position = len(self._calls)
            self._calls.append(_OpenCall(index=piece.index, provider_call_id=piece.call_id))
        call = self._calls[position]
        call.provider_call_id = call.provider_call_id or piece.call_id
        if piece.name and piece.name != call.name and not call.arguments:
            call.name += piece.name
        if piece.arguments:
            call.arguments.append(piece.arguments)
        self._add_fields(call.fields, piece.fields_json)
        name = self._names.get(call.name, call.name)
        return CallPiece(index=position, call_id=call.provider_call_id, name=name, arguments=piece.arguments)

    def _position(self, piece: CallPiece) -> int | None:
        """Return the position of the call that `piece` continues, or None if it starts a new call."""
        if piece.call_id:
            same_id = self._last(lambda call: call.provider_call_id == piece.call_id)
            if same_id is not None and (piece.index is None or self._calls[same_id].index in {None, piece.index}):
                return same_id
        current = self._last(lambda call: piece.index is None or call.index == piece.index)
        if current is None:
            return None
        call = self._calls[current]
        if piece.call_id and call.provider_call_id:
            return current if not piece.name and piece.arguments else None
        if not piece.name:
            return current
        if call.arguments:
            return None if piece.name != call.name or is_json(_joined_arguments(call.arguments)) else current
        return None if piece.index is None and call.name else current

    def _last(self, test: Callable[[_OpenCall], bool]) -> int | None:
        return next((n for n in reversed(range(len(self._calls))) if test(self._calls[n])), None)
