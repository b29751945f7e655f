"""Invalid requests to every method of every service get typed errors and log no traceback."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any, Final

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.chassis.identity.roles import CALLERS, ROLES, Role
from pawl.event.v1 import call_pb2
from pawl.launcher.suite import Suite
from pawl.tool.v1 import document_pb2, rule_pb2, source_pb2, tool_pb2
from tests.keys import METADATA
from tests.system.access.walk import OPEN, is_forwarded, served
from tests.system.suite.client import TAKEN, Refusal, addresses, outcome
from tests.tables import documented

pytestmark = pytest.mark.asyncio(loop_scope="session")

SERVICES = ("agent-loop", "tool-registry", "job-store", "notifier")
_COMPLAINTS = re.compile(r"rpc\.failed|Traceback|never awaited|never retrieved")
_AT_ONCE_MAX = 8
_SECONDS_MAX = 60.0
# A stream that is silent for this long has accepted its request.
_NEWS_SECONDS = 1.0
# A separate store, because unusual requests may create a rule that denies calls, and such a rule stays.
_ODD_STORE = (*METADATA, ("pawl-store", "odd"), ("pawl-user", "odd"))


@pytest.fixture(scope="module", autouse=True)
def no_complaints(suite: Suite) -> Iterator[None]:
    """Check that no log has a traceback: an invalid request is the client's fault."""
    logs = [path for path in suite.folder.logs.glob("*.log") if not path.name.startswith("postgres")]
    began = {path: path.stat().st_size for path in logs}
    yield
    for path, offset in began.items():
        new = path.read_bytes()[offset:].decode(errors="replace")
        assert [line for line in new.splitlines() if _COMPLAINTS.search(line)] == [], path.name


def channel_to(suite: Suite, service: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(addresses(suite, service)[0], options=[("grpc.max_send_message_length", -1)])


async def ask(channel: grpc.aio.Channel, path: str, data: bytes, *, streams: bool) -> Refusal:
    if not streams:
        unary: Any = channel.unary_unary(path)
        return await outcome(unary(data, metadata=_ODD_STORE, timeout=_SECONDS_MAX))
    behaviour: Any = channel.unary_stream(path)
    stream = behaviour(data, metadata=_ODD_STORE, timeout=_SECONDS_MAX)
    try:
        async with asyncio.timeout(_NEWS_SECONDS):
            return await outcome(stream.read())
    except TimeoutError:
        return TAKEN
    finally:
        stream.cancel()


@pytest.mark.parametrize("service", SERVICES)
async def test_unusual_values_in_requests_never_cause_an_internal_error(suite: Suite, service: str) -> None:
    """LOOP-15: every method gets malformed bytes, and each of its fields out of range or over its limit.

    The answer is OK or a reason that the contract lists for the method, never UNKNOWN or INTERNAL.
    """
    slots = asyncio.Semaphore(_AT_ONCE_MAX)
    async with channel_to(suite, service) as channel:

        async def judge(path: str, what: str, data: bytes, *, streams: bool) -> str:
            async with slots:
                found = await ask(channel, path, data, streams=streams)
            if what in GARBAGE:
                is_right = found == Refusal(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST")
            else:
                is_right = found == TAKEN or found.reason in documented()[path]
            return "" if is_right else f"{path} {what}: {found}"

        there = (await served(channel, METADATA)).items()
        # agent-loop forwards the requests of users to job-store.
        names = [name for name, many in there if not many and name not in OPEN and not is_forwarded((service, name))]
        methods = {name: method_of(name) for name in names if CALLERS[name] & (ROLES - {Role.DEPLOYMENT})}
        assert methods
        seen: set[str] = set()
        found = await asyncio.gather(
            *(
                judge(name, what, data, streams=method.server_streaming)
                for name, method in methods.items()
                for what, data in (*GARBAGE.items(), *odd(method, seen))
            )
        )
        nope = await ask(channel, f"{next(iter(methods))}Nope", b"", streams=False)
    assert list(filter(None, found)) == []
    assert (nope.code, nope.reason) == (grpc.StatusCode.UNIMPLEMENTED, "METHOD_NOT_FOUND")


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

    If several methods take a message, its fields get all values only in the first method. `seen` tracks this.
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
        entries, kind = getattr(message, field.name), field.message_type.fields_by_name["value"]
        if kind.message_type is not None:
            entries.get_or_create(value[0])
        else:
            entries[value[0]] = value[1] if kind.cpp_type == FieldDescriptor.CPPTYPE_STRING else 1
    elif hasattr(getattr(message, field.name), "append"):
        getattr(message, field.name).extend([value] * (1 if len(str(value)) > 1000 else _MANY))
    else:
        setattr(message, field.name, value)
