"""Calls that arrive in batches, as defined in `pawl.batch.v1`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from pawl.batch.v1 import batch_pb2
from pawl.batch.v1.batch_pb2_grpc import BatchServiceServicer
from pawl.chassis.process import tasks
from pawl.chassis.rpc import status
from pawl.chassis.rpc.batch_client import GATHER_CALLS_MIN, GATHER_SECONDS, UNPROCESSED_BYTES_MAX
from pawl.chassis.rpc.kinds import Behaviour as RawBehaviour
from pawl.chassis.rpc.kinds import Context, Encoder, Handler, encoder, parser
from pawl.chassis.rpc.parts import in_parts
from pawl.errors import MethodNotFound, PawlError, TooLarge
from pawl.server.rpc.interceptor import Interceptor, Method

# Once a message has this size, no more replies are added. A larger reply is sent on its own.
_MESSAGE_BYTES: Final = 1024 * 1024

# Streaming handlers pause while this many bytes are unsent.
_WAITING_BYTES_MAX: Final = 8 * 1024 * 1024

_Relayed = dict[str, tuple[RawBehaviour, Encoder]]
Put = Callable[[bytes], Awaitable[None]]
# Takes the bytes of a request. Returns the bytes of a single response, or passes the bytes of each response to `Put`.
Behaviour = Callable[[bytes, Put], Awaitable[bytes | None]]
_Carried = dict[str, tuple[Method, Behaviour]]


class BatchServicer(BatchServiceServicer):
    """Passes calls from batches to their methods. Methods with request streams are not supported."""

    def __init__(self, interceptor: Interceptor, *, bytes_max: int) -> None:
        self._interceptor = interceptor
        self._bytes_max = bytes_max
        self._carried: _Carried = {}
        self._relayed: _Relayed = {}
        self._streams: set[_Stream] = set()

    def add(self, service_name: str, handlers: Mapping[str, Handler]) -> None:
        for method_name, handler in handlers.items():
            if not handler.request_streaming:
                name = f"/{service_name}/{method_name}"
                method = self._interceptor.carried(name, is_stream=handler.response_streaming)
                self._carried[name] = method, _behaviour(handler, self._bytes_max)

    def add_relayed(self, service_name: str, handlers: Mapping[str, Handler]) -> None:
        """Accept relayed calls of methods with a single request and a response stream."""
        for method_name, handler in handlers.items():
            if handler.response_streaming and not handler.request_streaming:
                name = f"/{service_name}/{method_name}"
                behaviour = self._interceptor.wrap(name, handler, refuse=_raise)
                self._relayed[name] = behaviour, encoder(handler.response_serializer)

    def close_streams(self) -> None:
        """Ask the clients of all streams to use another replica. Running calls are still answered."""
        for stream in self._streams:
            stream.close()

    async def Batch(  # type: ignore[override]  # writes directly, from several tasks
        self, request_iterator: AsyncIterator[batch_pb2.BatchRequest], context: Context
    ) -> None:
        stream = _Stream(self._carried, self._relayed, context)
        self._streams.add(stream)
        try:
            await stream.serve(request_iterator)
        finally:
            self._streams.discard(stream)


class _Stream:
    def __init__(self, carried: _Carried, relayed: _Relayed, context: Context) -> None:
        self._carried = carried
        self._relayed = relayed
        self._context = context
        self._relays: dict[int, _Relay] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._replies: list[batch_pb2.Reply] = []
        self._waiting_bytes = 0
        self._response_bytes_max = 0
        self._closing = False
        self._ended = False
        self._has_work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def close(self) -> None:
        self._closing = True
        self._has_work.set()

    async def serve(self, requests: AsyncIterator[batch_pb2.BatchRequest]) -> None:
        """Serve calls until the client has closed its side and all calls are answered."""
        loop = asyncio.get_running_loop()
        reader = loop.create_task(self._read(requests), name="batch.read")
        writer = loop.create_task(self._write(), name="batch.write")
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
            while self._calls and not writer.done():
                await asyncio.wait({writer, *self._calls.values()}, return_when=asyncio.FIRST_COMPLETED)
            # Do not cancel a write in progress: gRPC would refuse the next one.
            self._ended = True
            self._has_work.set()
            await writer
        finally:
            await tasks.end([reader, writer, *self._calls.values()])

    async def _read(self, requests: AsyncIterator[batch_pb2.BatchRequest]) -> None:
        async for request in requests:
            self._response_bytes_max = request.response_bytes_max or self._response_bytes_max
            for call_id in request.cancelled_call_ids:
                if call_id in self._calls:
                    self._calls[call_id].cancel()
            for processed in request.processed:
                if processed.call_id in self._relays:
                    self._relays[processed.call_id].note_processed(processed.bytes)
            for call in request.calls:
                task = asyncio.get_running_loop().create_task(self._serve(call))
                self._calls[call.id] = task

    async def _write(self) -> None:
        while not self._ended or self._replies:
            await self._has_work.wait()
            # Relayed calls are mostly idle, but their first output is urgent.
            if len(self._calls) - len(self._relays) + len(self._replies) >= GATHER_CALLS_MIN:
                await asyncio.sleep(GATHER_SECONDS)
            self._has_work.clear()
            await self._flush()

    async def _flush(self) -> None:
        closing, self._closing = self._closing, False
        while self._replies or closing:
            taken = next(in_parts(self._replies, lambda reply: len(reply.response), size_max=_MESSAGE_BYTES), [])
            message = batch_pb2.BatchResponse(replies=taken, closing=closing)
            closing = False
            del self._replies[: len(taken)]
            await self._context.write(message)
            self._waiting_bytes -= sum(len(reply.response) for reply in taken)
            if self._waiting_bytes < _WAITING_BYTES_MAX:
                self._room.set()

    async def _serve(self, call: batch_pb2.Call) -> None:
        async def put(response: bytes) -> None:
            await self._room.wait()
            self._put(batch_pb2.Reply(id=call.id, response=self._checked(response)))

        try:
            if call.metadata:
                await self._relay(call, put)
                self._put(batch_pb2.Reply(id=call.id, last=True))
                return
            if call.method not in self._carried:
                raise MethodNotFound
            method, behaviour = self._carried[call.method]
            response = await method.serve_carried(
                lambda: behaviour(call.request, put), call.request_id, call.timeout_seconds
            )
            self._put(batch_pb2.Reply(id=call.id, response=self._checked(response), last=True))
        except PawlError as error:
            self._put(batch_pb2.Reply(id=call.id, last=True, failure=status.failure(error)))
        finally:
            del self._calls[call.id]
            self._relays.pop(call.id, None)

    async def _relay(self, call: batch_pb2.Call, put: Put) -> None:
        if call.method not in self._relayed:
            raise MethodNotFound
        behaviour, encode = self._relayed[call.method]
        context: Any = _Relay(self._context, call, encode, put)
        self._relays[call.id] = context
        await behaviour(None, context)

    def _checked(self, response: bytes | None) -> bytes | None:
        """Reject a response over the client's limit, which would end the stream and thus all other calls."""
        if response is not None and 0 < self._response_bytes_max < len(response):
            raise TooLarge(
                f"the response is {len(response)} bytes, but the caller accepts at most {self._response_bytes_max}"
            )
        return response

    def _put(self, reply: batch_pb2.Reply) -> None:
        self._replies.append(reply)
        self._waiting_bytes += len(reply.response)
        if self._waiting_bytes >= _WAITING_BYTES_MAX:
            self._room.clear()
        self._has_work.set()


class _Relay:
    """The context of a relayed call. It has the same methods as the context of a direct call.

    The peer is the sender of the batches.
    """

    def __init__(self, batch: Context, call: batch_pb2.Call, encode: Encoder, put: Put) -> None:
        self._request = call.request
        self._metadata = [(entry.key, entry.value) for entry in call.metadata]
        self._encode = encode
        self._put = put
        self._unprocessed_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self.peer, self.auth_context = batch.peer, batch.auth_context

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def _ignore(self, *_: object) -> None:
        """Do nothing, because a relayed call has no deadline, and its status and metadata are sent in batches."""

    code = done = set_trailing_metadata = time_remaining = _ignore

    async def send_initial_metadata(self, _: object) -> None:
        """Do nothing, because batches do not carry initial metadata."""

    async def read(self) -> bytes:
        return self._request

    async def write(self, response: Any) -> None:
        while self._unprocessed_bytes >= UNPROCESSED_BYTES_MAX:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        raw = self._encode(response)
        self._unprocessed_bytes += len(raw)
        await self._put(raw)

    def note_processed(self, size_bytes: int) -> None:
        self._unprocessed_bytes -= size_bytes
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def _raise(_: object, error: PawlError) -> None:
    raise error


def _behaviour(handler: Handler, bytes_max: int) -> Behaviour:
    parse = parser(handler.request_deserializer, bytes_max)
    serialise: Any = handler.response_serializer
    # Servicers that only services call do not use the context.
    nothing: Any = None
    if handler.response_streaming:
        stream: Any = handler.unary_stream

        async def answer_with_stream(raw: bytes, put: Put) -> None:
            async with aclosing(stream(parse(raw), nothing)) as responses:
                async for response in responses:
                    await put(serialise(response))

        return answer_with_stream
    unary: Any = handler.unary_unary

    async def answer(raw: bytes, _: Put) -> bytes:
        response: bytes = serialise(await unary(parse(raw), nothing))
        return response

    return answer
