"""Fields of a model's answer that Pawl does not know, put together from their chunks and kept as they came.

Nothing is parsed and written again: numbers, escapes and the order of keys stay
what the model server wrote, because it may have signed them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, TypeAlias

import msgspec

BYTES_MAX: Final = 512 * 1024
"""Most bytes that the unknown fields of one answer may have together."""

CALLS: Final = "tool_calls"
"""The place of the fields of calls among those of their message: a list with an object for each call, in order."""

FUNCTION: Final = "function"
"""The object inside a call that has fields of its own."""

RawObject: TypeAlias = dict[str, msgspec.Raw]

_NOTHING: Final = frozenset({b"null", b'""', b"[]", b"{}"})
_DEPTH_MAX: Final = 8

_read: Final = msgspec.json.Decoder(RawObject).decode
_read_calls: Final = msgspec.json.Decoder(list[RawObject]).decode
_write: Final = msgspec.json.Encoder().encode


class Fields:
    """The unknown fields of one object of an answer.

    What comes more than once is more of the same: lists and texts go on, objects
    are joined key by key, of anything else the last stands. What is repeated
    word for word counts once, unless it is a list.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[bytes]] = {}

    def add(self, object_json: bytes) -> None:
        """Take more fields, as a JSON object; empty bytes are none."""
        if object_json:
            _collect(self._values, _read(object_json))

    def json(self) -> bytes:
        """Return all fields as a JSON object; empty if there are none."""
        return _object(self._values, _DEPTH_MAX) if self._values else b""


def unknown(whole: Mapping[str, msgspec.Raw], known: Collection[str]) -> RawObject:
    """Return the fields of an object that are not `known` and say something.

    Raises:
        UnicodeDecodeError: one of them is no JSON.
    """
    left = {name: value for name, value in whole.items() if name not in known}
    for value in left.values():
        bytes(value).decode()
    return {name: value for name, value in left.items() if bytes(value) not in _NOTHING}


def with_calls(message_json: bytes, calls_json: Iterable[bytes]) -> bytes:
    """Return the fields of a message and of its calls as one JSON object; empty for none."""
    of_calls = [call or b"{}" for call in calls_json]
    if all(call == b"{}" for call in of_calls):
        return message_json
    mine = _write(CALLS) + b":[" + b",".join(of_calls) + b"]}"
    return (message_json[:-1] + b"," if message_json else b"{") + mine


def of_message(state_json: bytes) -> tuple[RawObject, list[RawObject]]:
    """Return what `with_calls` put together: the fields of the message, and those of each call."""
    if not state_json:
        return {}, []
    fields = _read(state_json)
    calls = fields.pop(CALLS, None)
    return fields, [] if calls is None else _read_calls(calls)


def of_function(call: Mapping[str, msgspec.Raw]) -> RawObject:
    """Return the fields of the function inside a call."""
    return _read(call[FUNCTION]) if FUNCTION in call else {}


def _collect(values: dict[str, list[bytes]], fields: Mapping[str, msgspec.Raw]) -> None:
    for name, raw in fields.items():
        value = bytes(raw)
        so_far = values.setdefault(name, [])
        if not so_far or value.startswith(b"[") or so_far[-1] != value:
            so_far.append(value)


def _object(values: Mapping[str, list[bytes]], depth: int) -> bytes:
    return b"{" + b",".join(_write(name) + b":" + _joined(parts, depth) for name, parts in values.items()) + b"}"


def _joined(parts: list[bytes], depth: int) -> bytes:
    """Return the one value that several parts make."""
    begins = {part[:1] for part in parts}
    if len(parts) == 1 or len(begins) > 1:
        return parts[-1]
    match begins.pop():
        case b"[":
            return b"[" + b",".join(inside for part in parts if (inside := part[1:-1].strip())) + b"]"
        case b'"':
            return b'"' + b"".join(part[1:-1] for part in parts) + b'"'
        case b"{" if depth:
            values: dict[str, list[bytes]] = {}
            for part in parts:
                _collect(values, _read(part))
            return _object(values, depth - 1)
        case _:
            return parts[-1]
