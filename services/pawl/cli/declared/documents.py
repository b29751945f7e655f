"""Converts between documents in files and the contract's protobuf messages."""

from __future__ import annotations

import base64
import difflib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeAlias

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from pawl.chassis import strict_json
from pawl.cli import wording

# Default values of agents' options, which are left out of the output.
_DEFAULTS: Final = (
    *("ROUND_LIMIT_POLICY_FINAL_ANSWER", "BATCH_ORDER_WAIT_FOR_DECISIONS", "UNKNOWN_OUTCOME_POLICY_TELL_MODEL"),
    *("TOKEN_BUDGET_POLICY_WAIT", "APPROVAL_EXPIRY_POLICY_DENY", "MODE_AUTO"),
)
_INTEGERS: Final = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)
_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_SCALARS: Final[Mapping[int, tuple[type | tuple[type, ...], str]]] = {
    FieldDescriptor.CPPTYPE_STRING: (str, "text; put it in quotes"),
    FieldDescriptor.CPPTYPE_BOOL: (bool, "true or false"),
    FieldDescriptor.CPPTYPE_DOUBLE: ((int, float), "a number"),
}

# A position in a document: names and indexes.
Place: TypeAlias = tuple[str | int, ...]


class InvalidDocument(ParseError):
    """Raised if a value is invalid for its field. `place` is its position in the document."""

    def __init__(self, message: str, place: Place) -> None:
        self.place = place
        super().__init__(message)


def to_message(document: Mapping[str, Any], message: Message) -> Message:
    """Fill a message with a document.

    A document has `schema` for the field `schema_json`, text for bytes, and ALLOW for RULE_EFFECT_ALLOW.

    Raises:
        InvalidDocument: A field is unknown, or a value is invalid for its field.
    """
    return ParseDict(_message(message.DESCRIPTOR, document, ()), message)


def to_document(message: Message) -> dict[str, Any]:
    """Return the document of a message, without default values. This is the inverse of `to_message`."""
    document: dict[str, Any] = _shown(message.DESCRIPTOR, MessageToDict(message, preserving_proto_field_name=True))
    return document


def _message(kind: Any, value: Any, place: Place) -> Any:
    """Convert a document to protobuf JSON."""
    if kind.full_name.startswith("google.protobuf."):
        return value
    if not isinstance(value, dict):
        raise _wrong(place, "a mapping of names to values", value)
    made: dict[str, Any] = {}
    for name, each in value.items():
        inner = (*place, str(name))
        field = kind.fields_by_name.get(str(name))
        if field is None and f"{name}_json" in kind.fields_by_name:
            made[f"{name}_json"] = base64.b64encode(strict_json.dumps_canonical(each)).decode()
        elif field is None:
            raise _unknown(kind, inner)
        else:
            made[str(name)] = _field(field, each, inner)
    return made


def _field(field: FieldDescriptor, value: Any, place: Place) -> Any:
    if value is None:
        return None
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if not isinstance(value, dict):
            raise _wrong(place, "a mapping of names to values", value)
        of_values = field.message_type.fields_by_name["value"]
        return {name: _value(of_values, each, (*place, str(name))) for name, each in value.items()}
    if not field.is_repeated:
        return _value(field, value, place)
    if not isinstance(value, list):
        raise _wrong(place, "a list", value)
    return [_value(field, each, (*place, index)) for index, each in enumerate(value)]


def _value(field: FieldDescriptor, value: Any, place: Place) -> Any:
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).isoformat()
    if field.message_type is not None:
        return _message(field.message_type, value, place)
    if field.enum_type is not None:
        return _enum(field.enum_type, value, place)
    if field.cpp_type in _RANGES:
        least, most = _RANGES[field.cpp_type]
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least <= value <= most:
            raise _wrong(place, f"a whole number from {least} to {most}", value)
        return value
    types, wanted = _SCALARS[field.cpp_type]
    if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
        raise _wrong(place, wanted, value)
    is_bytes = field.type == FieldDescriptor.TYPE_BYTES
    return base64.b64encode(str(value).encode()).decode() if is_bytes else value


def _enum(kind: EnumDescriptor, value: Any, place: Place) -> str:
    names = {name for each in kind.values for name in (each.name, _short_name(kind, each.name)) if each.number}
    name = _value_name(kind, value)
    if name not in kind.values_by_name:
        raise _wrong(place, f"one of {', '.join(sorted(names - set(kind.values_by_name)) or sorted(names))}", value)
    return str(name)


def _wrong(place: Place, wanted: str, value: Any) -> InvalidDocument:
    shown = repr(value) if isinstance(value, str | int | float | list | dict) else str(value)
    return InvalidDocument(f"{_path(place) or 'the document'} must be {wanted}, got {shown:.60}", place)


def _unknown(kind: Any, place: Place) -> InvalidDocument:
    known = [name.removesuffix("_json") for name in kind.fields_by_name]
    near = difflib.get_close_matches(str(place[-1]), known, n=1)
    advice = f"did you mean {near[0]!r}?" if near else "remove it, or correct its name"
    return InvalidDocument(f"unknown field {_path(place)!r}: {advice}", place)


def _path(place: Place) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _value_name(kind: EnumDescriptor, typed: Any) -> Any:
    named = [value.name for value in kind.values if value.name.endswith(f"_{typed}".upper())]
    return named[0] if len(named) == 1 and typed not in kind.values_by_name else typed


def _shown(kind: Any, value: Any) -> Any:
    """Convert protobuf JSON to a document without default values."""
    if isinstance(value, list):
        return [_shown(kind, each) for each in value]
    if not isinstance(value, dict) or kind is None:
        return value
    if kind.GetOptions().map_entry:
        held = kind.fields_by_name["value"]
        read = int if held.type in _INTEGERS else partial(_shown, held.message_type)
        return {name: read(each) for name, each in sorted(value.items())}
    made: dict[str, Any] = {}
    for name, each in value.items():
        field = kind.fields_by_name[name]
        if field.type == FieldDescriptor.TYPE_BYTES:
            content = base64.b64decode(each)
            is_json = name.endswith("_json")
            made[name.removesuffix("_json")] = json.loads(content) if is_json else content.decode(errors="replace")
        elif field.type in _INTEGERS:
            made[name] = int(each)
        elif field.enum_type is not None and each not in _DEFAULTS:
            names = [_short_name(field.enum_type, one) for one in (each if isinstance(each, list) else [each])]
            made[name] = names if isinstance(each, list) else names[0]
        elif field.enum_type is None and (shown := _shown(field.message_type, each)) != {}:
            made[name] = shown
    return made


def _short_name(kind: EnumDescriptor, name: str) -> str:
    short = wording.short_name(kind, kind.values_by_name[name].number).upper()
    return short if _value_name(kind, short) == name else name
