"""Translates between structs and protobuf messages by field name.

A `Translation` is created once, at import, and works in both directions. The following conventions cover most fields.
All other fields are listed as `Exceptions`. The import fails if the other side lacks a field, if types do not match, or
if an exception is not needed.

* The struct's field `x` corresponds to the message's `x` or `x_json`.
* A nested struct that has no field in the message is flattened: the message has the nested struct's fields.
* An enum member has the number of its prefixed name in the message's enum. UNSPECIFIED is None for optional fields.
* A float or a datetime corresponds to a Timestamp.
* `X | None` corresponds to an optional field. An optional field that is not `X | None` has the struct's default when
  absent.
* Nested structs, tuples and mappings correspond to messages, repeated fields and maps. Sets are written in
  sorted order.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum, IntEnum
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp

S = TypeVar("S")
M = TypeVar("M", bound=Message)
E = TypeVar("E", bound=Enum)

_TIMESTAMP: Final = "google.protobuf.Timestamp"
_CONTAINERS: Final[Mapping[Any, str]] = {tuple: "tuple", list: "list", frozenset: "frozenset", Sequence: "tuple"}
_INTS: Final = frozenset(
    {
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
    }
)
_FLOATS: Final = frozenset({FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT})


def seconds(time: Timestamp) -> float:
    """Return a Timestamp as seconds since 1970."""
    return time.seconds + time.nanos / 1e9


def timestamp(time: float) -> dict[str, int]:
    """Return the fields of a Timestamp, rounded to microseconds, from seconds since 1970."""
    whole, rest = divmod(round(time * 1e6), 1_000_000)
    return {"seconds": whole, "nanos": rest * 1000}


class Unknown(NamedTuple):
    """A value without a counterpart: an unknown number, UNSPECIFIED, or an invalid time.

    `field` is the path of the field that has the value.
    """

    field: str
    value: str
    number: int


def enum_defaults(struct: Any) -> dict[type[Enum], Enum]:
    values = [getattr(struct, name) for name in _field_names(type(struct))]
    found = {type(value): value for value in values if isinstance(value, Enum)}
    for value in filter(lambda value: _is_struct(type(value)), values):
        found |= enum_defaults(value)
    return found


class EnumTranslation(Generic[E]):
    def __init__(self, members: dict[int, E], numbers: Mapping[E, int]) -> None:
        self.members: Final = members
        self.numbers: Final = numbers
        self.read: Final[Callable[[int], E]] = members.__getitem__
        self.write: Final[Callable[[E], Any]] = numbers.__getitem__


class Translation(NamedTuple, Generic[S, M]):
    """A translation between a struct and a message. `fields` returns keyword arguments for the message."""

    read: Callable[[M], S]
    write: Callable[[S], M]
    fields: Callable[[S], Any]


def kinds_of(message: type[Message], name: str) -> Mapping[str, Any]:
    return {field.name: field for field in message.DESCRIPTOR.oneofs_by_name[name].fields}


class _Members(dict[int, Any]):
    """A mapping from numbers to enum members. A number without a member is unknown or UNSPECIFIED."""

    def __init__(self, members: Mapping[int, Any], missing: Callable[[int], Any]) -> None:
        super().__init__(members)
        self._missing = missing

    def __missing__(self, number: int) -> Any:
        return self._missing(number)


class Exceptions(NamedTuple):
    """Fields that are not translated by name.

    `read` computes a field of the struct from the whole message, and `write` computes a field of the message from the
    whole struct. `unwritten` fields are only read. `of_message` and `of_struct` list fields that exist only on that
    side, or that are not translated.
    """

    read: Mapping[str, Callable[[Any], Any]] = {}
    write: Mapping[str, Callable[[Any], Any]] = {}
    unwritten: Collection[str] = ()
    of_message: Collection[str] = ()
    of_struct: Collection[str] = ()


_NO_EXCEPTIONS: Final = Exceptions()


class Translator:
    """A factory of translations that treat unknown numbers in the same way.

    UNSPECIFIED becomes the default of its enum, if there is one. For other unknown values, `error` creates the
    exception to raise. `field` is the path of the message in the request, for errors.
    """

    def __init__(
        self,
        error: Callable[[Unknown], Exception],
        *,
        defaults: Mapping[type[Enum], Enum] = types.MappingProxyType({}),
    ) -> None:
        self._error = error
        self._defaults = defaults
        self._made: dict[tuple[type, str], Translation[Any, Any]] = {}

    def enum(self, kind: type[E], wire: Any, *, field: str = "", without: Collection[str] = ()) -> EnumTranslation[E]:
        """Return the translation of an enum. `without` lists the proto values that the enum lacks.

        Raises:
            TypeError: The two sides do not match.
        """
        descriptor: EnumDescriptor = getattr(wire, "DESCRIPTOR", wire)
        prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
        names = {value.name.removeprefix(prefix): value.number for value in descriptor.values}
        odd = (set(names) - set(kind.__members__) - {"UNSPECIFIED"}) ^ set(without) | set(kind.__members__) - set(names)
        if issubclass(kind, IntEnum):
            odd |= {member.name for member in kind if names.get(member.name) != member.value}
        if odd:
            raise TypeError(f"{kind.__name__} and {descriptor.full_name} differ in {sorted(odd)}")
        members = {names[member.name]: member for member in kind}
        default = typing.cast("E | None", self._defaults.get(kind))

        def missing(number: int) -> E:
            if default is not None and number == 0:
                return default
            raise self._error(Unknown(field, f"{prefix}{number}", number))

        return EnumTranslation(_Members(members, missing), {member: names[member.name] for member in kind})

    def moment(self, field: str) -> Callable[[Timestamp], datetime]:
        """Return a function that reads times. It raises `error` for a time outside the years 1 to 9999."""

        def read(time: Timestamp) -> datetime:
            try:
                return time.ToDatetime(tzinfo=UTC)
            except (ValueError, OverflowError):
                raise self._error(Unknown(field, f"the time {time.seconds} s {time.nanos} ns", 0)) from None

        return read

    def struct(
        self,
        struct: type[S],
        message: type[M],
        exceptions: Exceptions = _NO_EXCEPTIONS,
        *,
        field: str = "",
    ) -> Translation[S, M]:
        """Return the translation of a struct. Later translations use it where the struct is nested.

        Raises:
            TypeError: The two sides do not match.
        """
        made = _Maker(self, struct, message, exceptions, field).make()
        self._made[struct, message.DESCRIPTOR.full_name] = made
        return made

    def nested(self, struct: type[Any], descriptor: Any, field: str) -> Translation[Any, Any]:
        return self._made.get((struct, descriptor.full_name)) or self.struct(
            struct, GetMessageClass(descriptor), field=field
        )

    def one_of(
        self, message: type[M], name: str, kinds: Mapping[str, type[Any]], *, without: Collection[str] = ()
    ) -> Translation[Any, M]:
        """Return the translation of a oneof. `without` lists the proto's kinds that have no struct.

        A write sets only the oneof. Reading a message with an unset or unknown kind raises `error`.

        Raises:
            TypeError: The two sides do not match.
        """
        found, full_name = kinds_of(message, name), message.DESCRIPTOR.full_name
        if odd := set(found) ^ {*kinds, *without}:
            raise TypeError(f"{full_name}.{name}: these names have no struct or are not kinds: {sorted(odd)}")
        made = {kind: self.nested(struct, found[kind].message_type, "") for kind, struct in kinds.items()}
        named = {struct: (kind, made[kind].fields) for kind, struct in kinds.items()}

        def read(value: M) -> Any:
            kind = value.WhichOneof(name)
            if kind is None or kind not in made:
                raise self._error(Unknown(name, f"{full_name} of kind {kind}", 0))
            return made[kind].read(getattr(value, kind))

        def fields(value: Any) -> Any:
            kind, inner = named[type(value)]
            return {kind: inner(value)}

        return Translation(read, lambda value: message(**fields(value)), fields)


class _Code(NamedTuple):
    read: Callable[[str], str]
    write: Callable[[str], str]


_SAME: Final = _Code(read=str, write=str)
_IF_PRESENT: Final = "only if it is present"


class _Maker:
    def __init__(
        self, translator: Translator, struct: type[Any], message: type[Message], exceptions: Exceptions, field: str
    ) -> None:
        self._translator = translator
        self._struct = struct
        self._message = message
        self._exceptions = exceptions
        self._field = field
        self._wire: Mapping[str, Any] = message.DESCRIPTOR.fields_by_name
        self._scope: dict[str, Any] = {"message_type": message, "seconds": seconds, "timestamp": timestamp}
        self._problems: list[str] = []
        self._names: set[str] = set()
        self._writes: dict[str, str] = {}

    def make(self) -> Translation[Any, Any]:
        read = self._construction(self._struct, "value")
        known = {*self._writes, *self._exceptions.write, *self._exceptions.of_message}
        self._problems += [f"{name} is only in the message" for name in self._wire if name not in known]
        for name, write in self._exceptions.write.items():
            self._writes[name] = self._named(write, f"write_{name}") + "(value)"
        self._check_exceptions()
        if self._problems:
            names = f"{self._struct.__qualname__} and {self._message.DESCRIPTOR.full_name}"
            raise TypeError(f"{names}: {'; '.join(self._problems)}")
        pairs = [pair for pair in self._writes.items() if pair[0] not in self._exceptions.unwritten]
        arguments = "".join(f"\n        {name}={code}," for name, code in pairs)
        entries = "".join(f"\n        {name!r}: {code}," for name, code in pairs)
        presence = "    has = message.HasField\n" if " if has(" in read else ""
        source = (
            f"def read(message):\n{presence}    return {read}\n"
            f"def write(value):\n    return message_type({arguments}\n    )\n"
            f"def fields(value):\n    return {{{entries}\n    }}\n"
        )
        # The source contains only the names checked above, and no outside input.
        exec(compile(source, f"<translation of {self._struct.__name__}>", "exec"), self._scope)  # noqa: S102
        return Translation(self._scope["read"], self._scope["write"], self._scope["fields"])

    def _construction(self, struct: type[Any], path: str) -> str:
        arguments, present = [], set()
        hints = typing.get_type_hints(struct)
        for name in _field_names(struct):
            code = self._reading(name, hints[name], f"{path}.{name}")
            if code == _IF_PRESENT:
                present.add(name)
                if name not in self._wire:
                    self._problems.append(f"{name} is optional in the message but not `| None`")
            elif code:
                arguments.append(f"\n        {name}={code},")
        if present:
            names = self._named(present, "if_present")
            listed = "for field, found in message.ListFields()"
            arguments.append(f"\n        **{{field.name: found {listed} if field.name in {names}}},")
        return f"{self._named(struct, struct.__name__)}({''.join(arguments)}\n    )"

    def _reading(self, name: str, hint: Any, path: str) -> str:
        """Return the expression that reads a field of the struct, or an empty string if there is none."""
        exceptions = self._exceptions
        self._names.add(name)
        if name in exceptions.of_struct:
            return ""
        wire_name = name if name in self._wire else f"{name}_json"
        field = self._wire.get(wire_name)
        if field is not None and wire_name not in exceptions.of_message:
            needed = name not in exceptions.read or not {wire_name} & {*exceptions.write, *exceptions.unwritten}
            code = self._field_code(hint, field) if needed else _SAME
            self._writes[wire_name] = code.write(path)
            if name not in exceptions.read:
                return code.read(f"message.{wire_name}")
        if name in exceptions.read:
            return self._named(exceptions.read[name], f"read_{name}") + "(message)"
        if _is_struct(hint):
            return self._construction(hint, path)
        self._problems.append(f"{name} is only in the struct")
        return ""

    def _field_code(self, hint: Any, field: FieldDescriptor) -> _Code:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            if typing.get_origin(hint) not in {dict, Mapping}:
                self._problems.append(f"{field.name} is a map")
            return _Code(read=lambda code: f"dict({code})", write=str)
        optional, inner = _optional(hint)
        if field.is_repeated:
            return self._repeated_code(inner, field)
        element = self._element_code(inner, field, optional=optional)
        if not field.has_presence or (field.message_type is not None and not optional):
            return element
        if not optional:
            if element is not _SAME:
                self._problems.append(f"{field.name} is optional in the message but not `| None`")
            return _Code(read=lambda _: _IF_PRESENT, write=element.write)
        return _Code(
            read=lambda code: f"{element.read(code)} if has({field.name!r}) else None",
            write=lambda code: (
                element.write(code) if element is _SAME else f"None if {code} is None else {element.write(code)}"
            ),
        )

    def _repeated_code(self, hint: Any, field: FieldDescriptor) -> _Code:
        container = _CONTAINERS.get(typing.get_origin(hint))
        if container is None:
            self._problems.append(f"{field.name} is repeated")
            return _SAME
        element = self._element_code(_optional(typing.get_args(hint)[0])[1], field)
        ordered: Callable[[str], str] = (lambda code: f"sorted({code})") if container == "frozenset" else str
        if element is _SAME:
            return _Code(read=lambda code: f"{container}({code})", write=ordered)
        return _Code(
            read=lambda code: f"{container}([{element.read('each')} for each in {code}])",
            write=lambda code: f"[{element.write('each')} for each in {ordered(code)}]",
        )

    def _element_code(self, hint: Any, field: FieldDescriptor, *, optional: bool = False) -> _Code:
        if field.enum_type is not None and isinstance(hint, type) and issubclass(hint, Enum):
            return self._enum_code(hint, field, optional=optional)
        if field.message_type is not None and field.message_type.full_name == _TIMESTAMP:
            if hint is float:
                return _Code(read=lambda code: f"seconds({code})", write=lambda code: f"timestamp({code})")
            if hint is datetime:
                moment = self._named(self._translator.moment(self._path(field)), "moment")
                # Message constructors also accept a datetime, but that takes five times as long.
                return _Code(
                    read=lambda code: f"{moment}({code})",
                    write=lambda code: f"timestamp({code}.timestamp())",
                )
        elif field.message_type is not None and _is_struct(hint):
            nested = self._translator.nested(hint, field.message_type, self._path(field))
            read = self._named(nested.read, f"read_{field.name}")
            write = self._named(nested.fields, f"fields_{field.name}")
            return _Code(read=lambda code: f"{read}({code})", write=lambda code: f"{write}({code})")
        elif field.message_type is None and field.enum_type is None and _fits(hint, field):
            return _SAME
        self._problems.append(f"{field.name} is not {getattr(hint, '__name__', hint)}")
        return _SAME

    def _enum_code(self, kind: type[Enum], field: FieldDescriptor, *, optional: bool) -> _Code:
        found = self._translator.enum(kind, field.enum_type, field=self._path(field))
        members: dict[int, Any] = found.members
        numbers: dict[Any, int] = dict(found.numbers)
        if optional and not field.has_presence:
            members[0], numbers[None] = None, 0
        read = self._named(members, f"{kind.__name__}_members")
        if issubclass(kind, IntEnum):
            return _Code(read=lambda code: f"{read}[{code}]", write=str)
        write = self._named(numbers, f"{kind.__name__}_numbers")
        return _Code(read=lambda code: f"{read}[{code}]", write=lambda code: f"{write}[{code}]")

    def _path(self, field: FieldDescriptor) -> str:
        return f"{self._field}.{field.name}" if self._field else field.name

    def _named(self, thing: Any, name: str) -> str:
        name = f"{name}_{len(self._scope)}"
        self._scope[name] = thing
        return name

    def _check_exceptions(self) -> None:
        of_wire = {*self._exceptions.write, *self._exceptions.unwritten, *self._exceptions.of_message}
        of_struct = {*self._exceptions.read, *self._exceptions.of_struct}
        unknown = of_wire - set(self._wire) | of_struct - self._names
        self._problems += [f"the exception {name} is not a field" for name in sorted(unknown)]


def _optional(hint: Any) -> tuple[bool, Any]:
    optional = False
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
        optional = len(parts) < len(typing.get_args(hint))
        hint = parts[0] if len(parts) == 1 else hint
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    return optional, hint


def _fits(hint: Any, field: FieldDescriptor) -> bool:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return hint is bool
        case FieldDescriptor.CPPTYPE_STRING:
            return hint is (bytes if field.type == FieldDescriptor.TYPE_BYTES else str)
        case kind:
            return (hint is int and kind in _INTS) or (hint is float and kind in _FLOATS)


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and (issubclass(hint, msgspec.Struct) or dataclasses.is_dataclass(hint))


def _field_names(struct: type[Any]) -> tuple[str, ...]:
    if issubclass(struct, msgspec.Struct):
        return struct.__struct_fields__
    return tuple(field.name for field in dataclasses.fields(struct))
