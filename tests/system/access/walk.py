"""Calls every method of every listener of a suite with one caller's credential."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection_pb2

from pawl.chassis.identity.roles import CALLERS
from pawl.notify.v1 import notify_pb2
from pawl.server.rpc.reflection import NAME, OLD_NAME
from pawl.tool.v1 import tool_pb2

Metadata = Sequence[tuple[str, str | bytes]]

T = TypeVar("T", bound=tuple[str, str])

_TRIES: Final = 5
_SECONDS_MAX: Final = 60.0
_GEN: Final = Path(tool_pb2.__file__).parents[2]
# After they read an empty request, these methods check more than the table.
_BY_CONTENT: Final = ("/pawl.tool.v1.SourceService/AddSource", "/pawl.tool.v1.RuleService/CreateRule")
OPEN: Final = {f"/{health.SERVICE_NAME}/Check": False, f"/{health.SERVICE_NAME}/Watch": False}
# Answered immediately; an empty request would wait for news.
_REQUESTS: Final = {
    "/pawl.notify.v1.NotifyService/Subscribe": notify_pb2.SubscribeRequest(after_number=2**64 - 1).SerializeToString()
}


class Answer(NamedTuple):
    code: str
    text: str = ""
    trailer: bytes = b""


def methods() -> dict[str, bool]:
    found = dict(OPEN)
    for path in sorted(_GEN.rglob("*_pb2.py")):
        module = ".".join(("pawl", *path.relative_to(_GEN).with_suffix("").parts))
        for service in importlib.import_module(module).DESCRIPTOR.services_by_name.values():
            found |= {f"/{service.full_name}/{method.name}": method.client_streaming for method in service.methods}
    return found | dict.fromkeys((f"/{name}/ServerReflectionInfo" for name in (NAME, OLD_NAME)), True)


async def served(channel: grpc.aio.Channel, metadata: Metadata) -> dict[str, bool]:
    ask: Any = channel.stream_stream(
        f"/{NAME}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    stream = ask(metadata=metadata, timeout=_SECONDS_MAX)
    await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await stream.read()
    stream.cancel()
    has = {NAME, *(service.name for service in answer.list_services_response.service)}  # without reflection itself
    return {name: many for name, many in methods().items() if name.split("/")[1] in has}


def is_forwarded(at: tuple[str, str]) -> bool:
    """Return whether the method only accepts requests that agent-loop forwards."""
    listener, name = at
    return listener == "job-store" and name.startswith("/pawl.agent.v1.")


def wrong(answers: Mapping[T, Answer], callers: Collection[str], refusal: str) -> dict[T, Answer]:
    """Return the answers that the access table does not allow for a caller of these kinds."""
    return {at: answer for at, answer in answers.items() if not _is_right(at, answer, callers, refusal)}


def _is_right(at: tuple[str, str], answer: Answer, callers: Collection[str], refusal: str) -> bool:
    name = at[1]
    if is_forwarded(at):
        # Methods that agent-loop answers itself do not exist there.
        return answer.code in {refusal, "UNIMPLEMENTED"}
    if name not in OPEN and CALLERS.get(name, frozenset()).isdisjoint(callers):
        return answer.code == refusal
    by_content = answer.code == "PERMISSION_DENIED" and name in _BY_CONTENT
    return by_content or answer.code not in {"PERMISSION_DENIED", "UNAUTHENTICATED"}


async def walk(channel: grpc.aio.Channel, names: Mapping[str, bool], metadata: Metadata) -> dict[str, Answer]:
    """Call each method with an empty request or an empty stream, all concurrently."""
    answers = await asyncio.gather(*(_call(channel, name, metadata, many=many) for name, many in names.items()))
    return dict(zip(names, answers, strict=True))


async def _call(channel: grpc.aio.Channel, name: str, metadata: Metadata, *, many: bool) -> Answer:
    for _ in range(_TRIES - 1):
        answer = await _try(channel, name, metadata, many=many)
        # The gRPC client may report this instead of the status if a server ends a call while its request is sent.
        if answer.text != "Internal error from Core":
            return answer
    return await _try(channel, name, metadata, many=many)


async def _try(channel: grpc.aio.Channel, name: str, metadata: Metadata, *, many: bool) -> Answer:
    request = _REQUESTS.get(name, b"")
    begin: Any = channel.stream_stream(name) if many else channel.unary_stream(name)
    call = begin(_stream() if many else request, metadata=metadata, timeout=_SECONDS_MAX)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        trailing = dict(error.trailing_metadata() or ())
        return Answer(error.code().name, error.details() or "", bytes(trailing.get("grpc-status-details-bin", b"")))
    finally:
        call.cancel()
    return Answer("OK")


async def _stream(*requests: bytes) -> AsyncIterator[bytes]:
    for request in requests:
        yield request
