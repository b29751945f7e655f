"""Requests to every method with one unusual value each, generated from the contract alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import document_pb2, rule_pb2, source_pb2, tool_pb2

GARBAGE: Final = {"no message": b"\xff\xff\xff", "endless groups": b"\x0b" * 100_000}
_DEPTH_MAX: Final = 3
_MANY: Final = 3000
_LONG: Final = 300_000

# Values that may be mistaken for a line break, another alphabet, a path, a subject, SQL or a format.
_TEXTS: Final = ("a\0b", "é٣\x1b[2J", "x" * _LONG, "../a*.b", "a'--%s{}")
_BYTES: Final = (b"\xff", b"[" * 20_000, b'{"a": 1e999, "b": "\\ud800"}', b"x" * _LONG)
_NUMBERS: Final = {
    FieldDescriptor.CPPTYPE_DOUBLE: (float("nan"), -1.0, 1e300),
    FieldDescriptor.CPPTYPE_UINT32: (1, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (1, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 253402300800),
    FieldDescriptor.CPPTYPE_BOOL: (True,),
    FieldDescriptor.CPPTYPE_ENUM: (1, 99, -1),
}

# Valid requests for methods where an empty one is rejected too early.
_PLAIN: Final[dict[str, Message]] = {
    "StartRun": agent_pb2.StartRunRequest(text="hello"),
    "SendMessage": agent_pb2.SendMessageRequest(conversation_id="absent", text="hello"),
    "Decide": agent_pb2.DecideRequest(
        run_id="absent",
        decision=types_pb2.CallDecision(call_id="absent", kind=call_pb2.DECISION_KIND_APPROVE, digest="0" * 64),
    ),
    "CreateRule": rule_pb2.CreateRuleRequest(
        rule=rule_pb2.Rule(effect=rule_pb2.RULE_EFFECT_DENY, scope=rule_pb2.RULE_SCOPE_USER, tool_name="nothing")
    ),
    "PutDocument": document_pb2.PutDocumentRequest(name="odd", text="odd"),
    "RegisterTool": tool_pb2.RegisterToolRequest(
        definition=tool_pb2.ToolDefinition(
            name="odd_tool",
            description="Odd.",
            arguments_schema_json=b'{"type":"object"}',
            context=call_pb2.EXECUTION_CONTEXT_FRONTEND,
        ),
        replace=True,
    ),
    "AddSource": source_pb2.AddSourceRequest(
        config=source_pb2.SourceConfig(
            name="odd",
            http_endpoint=source_pb2.HttpEndpointConfig(url="https://192.0.2.1/a", method="GET", description="Odd."),
        ),
        replace=True,
    ),
}


def method_of(path: str) -> MethodDescriptor:
    service, _, name = path[1:].partition("/")
    return Default().FindServiceByName(service).FindMethodByName(name)


def odd(method: MethodDescriptor, seen: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yield every unusual request to a method, with a description.

    A field of a message that several methods take gets all values in the first method only, tracked by `seen`.
    """
    plain = _PLAIN.get(method.name) or GetMessageClass(method.input_type)()
    yield "as it is", plain.SerializeToString()
    for path, field in _leaves(method.input_type, ()):
        values = _values(field)[:1] if field.full_name in seen else _values(field)
        seen.add(field.full_name)
        for value in values:
            request = type(plain)()
            request.CopyFrom(plain)
            _put(request, path, field, value)
            yield f"{'.'.join((*path, field.name))} {str(value)[:20]!a}", request.SerializeToString()


def _leaves(descriptor: Descriptor, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], FieldDescriptor]]:
    for field in descriptor.fields:
        below = field.message_type
        if below is None or below.GetOptions().map_entry:
            yield path, field
        elif len(path) < _DEPTH_MAX:
            yield from _leaves(below, (*path, field.name))


def _values(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.message_type is not None:
        return (*((odd, "x") for odd in _TEXTS), ("x", _TEXTS[0]))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS
    return _NUMBERS[field.cpp_type]


def _put(message: Any, path: tuple[str, ...], field: FieldDescriptor, value: Any) -> None:
    for part in path:
        below = getattr(message, part)
        message = below.add() if hasattr(below, "add") else below
    if field.message_type is not None:
        getattr(message, field.name)[value[0]] = value[1]
    elif hasattr(getattr(message, field.name), "append"):
        getattr(message, field.name).extend([value] * (1 if len(str(value)) > 1000 else _MANY))
    else:
        setattr(message, field.name, value)
