"""Unknown fields of a model's answer, assembled from its chunks and stored verbatim.

The fields are never parsed and re-encoded. Numbers, escapes and key order do not change, because the model server may
have signed them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, TypeAlias

import msgspec

# Limit for all unknown fields of one answer.
BYTES_MAX: Final = 512 * 1024

# The key of the calls' fields within the message's: a list with one object per call, in order.
CALLS: Final = "tool_calls"

# The key of the object inside a call that can also have unknown fields.
FUNCTION: Final = "function"

RawObject: TypeAlias = dict[str, msgspec.Raw]

_NOTHING: Final = frozenset({b"null", b'""', b"[]", b"{}"})
_DEPTH_MAX: Final = 8

_read: Final = msgspec.json.Decoder(RawObject).decode
_read_calls: Final = msgspec.json.Decoder(list[RawObject]).decode
_write: Final = msgspec.json.Encoder().encode


class Fields:
    """The unknown fields of one object in an answer.

    Repeated fields are combined: lists and strings are concatenated, and objects are merged by key. For other values,
    the last one wins. An identical repetition of anything but a list counts once.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[bytes]] = {}

    def add(self, object_json: bytes) -> None:
        """Add fields from a JSON object. Empty bytes mean none."""
        if object_json:
            _collect(self._values, _read(object_json))

    def json(self) -> bytes:
        """Return all fields as a JSON object, or an empty value if there are none."""
        return _object(self._values, _DEPTH_MAX) if self._values else b""


def unknown(whole: Mapping[str, msgspec.Raw], known: Collection[str]) -> RawObject:
    """Return the fields that are neither `known` nor empty.

    Raises:
        UnicodeDecodeError: A field is not valid UTF-8.
    """
    left = {name: value for name, value in whole.items() if name not in known}
    for value in left.values():
        bytes(value).decode()
    return {name: value for name, value in left.items() if bytes(value) not in _NOTHING}


def with_calls(message_json: bytes, calls_json: Iterable[bytes]) -> bytes:
    """Return the fields of a message and its calls as one JSON object, or an empty value if there are none."""
    of_calls = [call or b"{}" for call in calls_json]
    if all(call == b"{}" for call in of_calls):
        return message_json
    mine = _write(CALLS) + b":[" + b",".join(of_calls) + b"]}"
    return (message_json[:-1] + b"," if message_json else b"{") + mine


def of_message(state_json: bytes) -> tuple[RawObject, list[RawObject]]:
    if not state_json:
        return {}, []
    fields = _read(state_json)
    calls = fields.pop(CALLS, None)
    return fields, [] if calls is None else _read_calls(calls)


def of_function(call: Mapping[str, msgspec.Raw]) -> RawObject:
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
