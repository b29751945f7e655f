"""A small service with methods of all four RPC kinds, and its client."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.wrappers_pb2 import StringValue

from pawl.chassis.identity.auth import current_principal
from pawl.chassis.rpc.client import open_channel
from pawl.chassis.rpc.request_id import current_request_id
from pawl.errors import RunNotFound
from pawl.server.rpc.interceptor import count_as_stream
from pawl.server.rpc.server import RpcServer

T = TypeVar("T")
_TRIES: Final = 50

SERVICE = "test.v1.EchoService"
ECHO_METHODS: Final = [f"/{SERVICE}/{name}" for name in ("Unary", "Generate", "Write", "Collect", "Talk")]


@dataclass
class EchoServicer:
    """Echoes the request, unless its text is the name of another behaviour."""

    entered: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    generator: AsyncIterator[StringValue] | None = None
    generator_closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def started(self, call: Awaitable[T]) -> asyncio.Future[T]:
        """Make a call that waits, and return it once its handler has started."""
        made = asyncio.ensure_future(call)
        await self.entered.wait()
        return made

    async def act(self, request: StringValue, context: Any) -> StringValue:
        match request.value.split(":"):
            case ["crash"]:
                raise RuntimeError("the password is hunter2")
            case ["not-found"]:
                raise RunNotFound
            case ["group"]:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_raise(RunNotFound()))
            case ["crash-group"]:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_raise(RuntimeError("hunter2")))
            case ["gone"]:
                raise grpc.aio.InternalError("what gRPC raises when a write fails")
            case ["gone-group"]:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_raise(grpc.aio.InternalError("what gRPC raises when a write fails")))
            case ["abort"]:
                await context.abort(grpc.StatusCode.DATA_LOSS, "as the servicer says")
            case ["abort-group"]:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(context.abort(grpc.StatusCode.DATA_LOSS, "as the servicer says"))
            case ["timeout"]:
                raise TimeoutError("a timeout of the servicer's own: hunter2")
            case ["wait"]:
                await self._wait()
            case ["long-poll"]:
                count_as_stream()
                await self._wait()
            case ["turns", turns]:
                await self._wait()
                for _ in range(int(turns)):
                    await asyncio.sleep(0)
                return StringValue(value="x" * 100_000)
            case ["who"]:
                principal = current_principal()
                kind = "service" if principal.is_service else "user"
                return StringValue(value=f"{kind}/{principal.store_id}/{principal.user_id}")
            case ["certificate"]:
                return StringValue(value=context.auth_context()["x509_pem_cert"][0].decode())
            case ["request-id"]:
                return StringValue(value=current_request_id())
            case ["big", size]:
                return StringValue(value="x" * int(size))
        return request

    async def _wait(self) -> None:
        self.entered.set()
        self.waiting += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.waiting -= 1

    async def unary(self, request: StringValue, context: Any) -> StringValue:
        return await self.act(request, context)

    def generate(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        # Keep a reference, so that the garbage collector does not close it.
        self.generator = self._generate(request, context)
        return self.generator

    async def _generate(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        try:
            yield StringValue(value="first")
            if request.value == "flood":
                while True:
                    self.entered.set()
                    yield StringValue(value="x" * 100_000)
            yield await self.act(request, context)
        finally:
            self.generator_closed.set()

    async def write(self, request: StringValue, context: Any) -> None:
        await context.write(StringValue(value="first"))
        await context.write(await self.act(request, context))

    async def collect(self, requests: AsyncIterator[StringValue], context: Any) -> StringValue:
        texts = []
        async for request in requests:
            texts.append((await self.act(request, context)).value)
            if request.value == "enough":
                break
        return StringValue(value=",".join(texts))

    async def talk(self, requests: AsyncIterator[StringValue], context: Any) -> AsyncIterator[StringValue]:
        async for request in requests:
            yield await self.act(request, context)
            if request.value == "enough":
                break


async def _raise(error: Exception) -> None:
    raise error


def add_echo_to_server(servicer: EchoServicer, server: grpc.aio.Server) -> None:
    coding: Any = {"request_deserializer": StringValue.FromString, "response_serializer": StringValue.SerializeToString}
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Unary": grpc.unary_unary_rpc_method_handler(servicer.unary, **coding),
        "Generate": grpc.unary_stream_rpc_method_handler(servicer.generate, **coding),
        "Write": grpc.unary_stream_rpc_method_handler(servicer.write, **coding),
        "Collect": grpc.stream_unary_rpc_method_handler(servicer.collect, **coding),
        "Talk": grpc.stream_stream_rpc_method_handler(servicer.talk, **coding),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)


class EchoStub:
    """A client like the generated stubs. With `raw`, it sends bytes unchanged."""

    def __init__(self, channel: grpc.aio.Channel, *, raw: bool = False) -> None:
        coding: Any = {
            "request_serializer": None if raw else StringValue.SerializeToString,
            "response_deserializer": StringValue.FromString,
        }
        self.unary: Any = channel.unary_unary(f"/{SERVICE}/Unary", **coding)
        self.generate: Any = channel.unary_stream(f"/{SERVICE}/Generate", **coding)
        self.write: Any = channel.unary_stream(f"/{SERVICE}/Write", **coding)
        self.collect: Any = channel.stream_unary(f"/{SERVICE}/Collect", **coding)
        self.talk: Any = channel.stream_stream(f"/{SERVICE}/Talk", **coding)
        self.missing: Any = channel.unary_unary(f"/{SERVICE}/Missing", **coding)
        self.missing_stream: Any = channel.stream_stream(f"/{SERVICE}/Missing", **coding)

    def call(self, kind: str, text: str, **kwargs: Any) -> Awaitable[list[str]]:
        return self.send(kind, StringValue(value=text), **kwargs)

    async def send(self, kind: str, request: Any, **kwargs: Any) -> list[str]:
        method = getattr(self, kind)
        for _ in range(_TRIES - 1):
            try:
                return await self._send(method, kind, request, **kwargs)
            except grpc.aio.AioRpcError as error:
                # The gRPC client may report this instead of the status if a server ends a call while the request is
                # sent.
                if error.details() != "Internal error from Core":
                    raise
        return await self._send(method, kind, request, **kwargs)

    async def _send(self, method: Any, kind: str, request: Any, **kwargs: Any) -> list[str]:
        if kind in {"collect", "talk"}:
            request = _once(request)
        if kind in {"unary", "collect"}:
            return [(await method(request, **kwargs)).value]
        return [response.value async for response in method(request, **kwargs)]


async def _once(request: Any) -> AsyncIterator[Any]:
    yield request


KINDS = ("unary", "generate", "write", "collect", "talk")

# Starts a server for the servicer of the test: `async with serve(streams_max=1) as server`
Serve = Callable[..., AbstractAsyncContextManager[RpcServer]]


@asynccontextmanager
async def echoing(serving: AbstractAsyncContextManager[RpcServer], **options: Any) -> AsyncIterator[EchoStub]:
    async with serving as server, open_channel(server.address, **options) as channel:
        yield EchoStub(channel)


async def wait_for_file(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        await asyncio.sleep(0.02)
