"""One handler shape for the four kinds of RPC. The handler receives raw bytes and parses them.

`read_raw` turns any handler from generated code into a function that reads its own requests. Servicer methods may be
coroutines or async generators. grpc.aio treats every method as a bidirectional stream, which is the only kind whose
requests it does not read itself.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeAlias

import grpc

from pawl.errors import MalformedRequest, TooLarge

# gRPC's classes are generic only in their type stubs.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = "Callable[[Any, Context], Any]"
Parser: TypeAlias = Callable[[bytes], Any]
Encoder: TypeAlias = Callable[[Any], bytes]
Receive: TypeAlias = "Callable[[Context], Awaitable[bytes]]"


def read_raw(handler: Handler, receive: Receive, *, bytes_max: int) -> Behaviour:
    """Return a coroutine function that takes raw requests, parses them and calls the servicer.

    A method's single request is read with `receive`. The function returns the response of a unary method, and writes
    the responses of a streaming method to the call.

    The returned function raises:
        TooLarge: A message is over `bytes_max`.
        MalformedRequest: A message cannot be parsed.
    """
    parse = parser(handler.request_deserializer, bytes_max)
    call: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    answer = _send if handler.response_streaming else _return

    async def take_one(_: AsyncIterator[bytes], context: Context) -> Any:
        request = parse(await receive(context))
        return await answer(lambda: call(request, context), context)

    async def take_many(raw: AsyncIterator[bytes], context: Context) -> Any:
        requests = _parsed(raw, parse)
        try:
            return await answer(lambda: call(requests, context), context)
        finally:
            # A task that the servicer left behind may still be reading.
            with suppress(RuntimeError):
                await requests.aclose()

    return take_many if handler.request_streaming else take_one


def parser(deserialize: Parser | None, bytes_max: int) -> Parser:
    """Return a message parser. It raises TooLarge and MalformedRequest, as described in `read_raw`."""

    def parse(raw: bytes) -> Any:
        if len(raw) > bytes_max:
            raise TooLarge(f"the message is {len(raw)} bytes, over the limit of {bytes_max}")
        if deserialize is None:
            return raw
        try:
            return deserialize(raw)
        except Exception:  # noqa: BLE001  # each message class raises its own
            raise MalformedRequest from None

    return parse


def encoder(serialize: Encoder | None) -> Encoder:
    """Return a serializer that leaves responses unchanged if the servicer has already encoded them."""

    def encode(response: Any) -> bytes:
        return response if serialize is None or isinstance(response, bytes) else serialize(response)

    return encode


async def _parsed(raw: AsyncIterator[bytes], parse: Parser) -> AsyncGenerator[Any, None]:
    source: Any = aiter(raw)
    try:
        async for request in source:
            yield parse(request)
    finally:
        await source.aclose()


async def _return(call: Callable[[], Any], _: Context) -> Any:
    return await call()


async def _send(call: Callable[[], Any], context: Context) -> None:
    """Call a servicer's method and write what an async generator yields. A coroutine writes its own responses.

    grpc.aio could also drive the generator, but if the client disconnects during a write, it leaves closing the
    generator to the garbage collector.

    The initial metadata is sent first. If it were sent with the first response and that write was cancelled, gRPC would
    refuse the subsequent status, and the client would wait forever. If the client disconnects before the metadata is
    sent, the method is not called.
    """
    await context.send_initial_metadata(())
    responses = call()
    if inspect.isawaitable(responses):
        await responses
        return
    async with aclosing(responses):
        async for response in responses:
            await context.write(response)
