"""Complete requests with one value that the service does not know: a new enum value, or a time out of range."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterable, Callable, Iterator
from typing import Any, Final

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor

UNKNOWN: Final = 999
_SECONDS: Final = 2**60
# Codes that a service never returns to a newer client
BROKEN: Final = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})
_DEPTH_MAX: Final = 6

Path = tuple[FieldDescriptor, ...]


def calls_by_method(*services: ServiceDescriptor) -> dict[str, list[tuple[str, Any]]]:
    found = (each for service in services for each in calls(service))
    return {
        method: [(field, request) for _, field, request in group]
        for method, group in itertools.groupby(found, key=lambda each: each[0])
    }


async def code_of(answer: Any, *, is_enough: Callable[[Any], bool] = lambda _: False) -> grpc.StatusCode:
    """Return the status code of a call. A stream is OK once a response is enough."""
    try:
        if not isinstance(answer, AsyncIterable):
            await answer
            return grpc.StatusCode.OK
        async for response in answer:
            if is_enough(response):
                break
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def calls(service: ServiceDescriptor) -> Iterator[tuple[str, str, Any]]:
    for method in service.methods:
        for path in _unknown_fields(method.input_type, ()):
            request = message_factory.GetMessageClass(method.input_type)()
            _fill(request, path)
            yield method.name, ".".join(field.name for field in path), request


def _unknown_fields(message: Descriptor, above: Path) -> Iterator[Path]:
    for field in message.fields:
        path = (*above, field)
        if field.enum_type is not None or _is_time(field):
            yield path
        elif field.message_type is not None and _is_to_follow(field.message_type, above):
            yield from _unknown_fields(field.message_type, path)


def _is_time(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.full_name == "google.protobuf.Timestamp"


def _is_to_follow(kind: Descriptor, above: Path) -> bool:
    if kind.GetOptions().map_entry or len(above) >= _DEPTH_MAX:
        return False
    return all(each.containing_type is not kind for each in above)


def _fill(message: Any, path: Path) -> None:
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None or field.containing_oneof is not None:
            continue
        value = _sample(field)
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    field, *below = path
    if below:
        inner = getattr(message, field.name)
        if field.is_repeated:
            inner = inner.add()
        inner.SetInParent()
        _fill(inner, tuple(below))
    elif _is_time(field):
        inner = getattr(message, field.name)
        (inner.add() if field.is_repeated else inner).seconds = _SECONDS
    elif field.is_repeated:
        getattr(message, field.name)[:] = [UNKNOWN]
    else:
        setattr(message, field.name, UNKNOWN)


def _sample(field: FieldDescriptor) -> Any:
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return b"{}"
        case FieldDescriptor.CPPTYPE_STRING:
            return "" if field.name in {"page_token", "idempotency_key"} else "x1"
        case FieldDescriptor.CPPTYPE_BOOL:
            return False
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return 2.0
        case _:
            return 1
