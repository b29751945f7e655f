"""The four kinds of RPC, brought to one: raw bytes in, parsed by us.

`read_raw` turns a handler as generated code registers it into a function that
reads its request or requests by itself, whatever the kind and whether the
servicer's method is a coroutine or an async generator. To grpc.aio each of them is a stream in both directions:
that is the only kind of which it reads nothing before it is asked to.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeAlias

import grpc

from pawl.errors import MalformedRequest, TooLarge

# gRPC's classes are generic in their type stubs only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = "Callable[[Any, Context], Any]"
Parser: TypeAlias = Callable[[bytes], Any]
Receive: TypeAlias = "Callable[[Context], Awaitable[bytes]]"


def read_raw(handler: Handler, receive: Receive, *, bytes_max: int) -> Behaviour:
    """Return a coroutine function that takes the requests as grpc.aio gives them where there is no deserialiser.

    It parses them, one that `receive` reads where the method has one, and calls the
    servicer. It returns the response where there is one; others it has written.

    Raises (the function):
        TooLarge: a message is over `bytes_max`.
        MalformedRequest: bytes are not a message of the method's type.
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
    """Return what turns the bytes of a message into the message, and refuses those that `read_raw` says."""

    def parse(raw: bytes) -> Any:
        if len(raw) > bytes_max:
            raise TooLarge(f"the message has {len(raw)} bytes, the limit is {bytes_max}")
        if deserialize is None:
            return raw
        try:
            return deserialize(raw)
        except Exception:  # noqa: BLE001  # each message class raises its own
            raise MalformedRequest from None

    return parse


async def _parsed(raw: AsyncIterator[bytes], parse: Parser) -> AsyncGenerator[Any, None]:
    """Yield the requests of a stream, parsed as they are read."""
    source: Any = aiter(raw)
    try:
        async for request in source:
            yield parse(request)
    finally:
        await source.aclose()


async def _return(call: Callable[[], Any], _: Context) -> Any:
    """Return the one response of a servicer's method."""
    return await call()


async def _send(call: Callable[[], Any], context: Context) -> None:
    """Call a servicer's method and write what an async generator yields; a coroutine writes for itself.

    grpc.aio would drive the generator too, but leaves closing it to the garbage
    collector when the client goes away in the middle of a write.

    The initial metadata goes first: if it went with the first response and that
    write was cancelled, gRPC would refuse the status that follows, and the client
    would wait for ever. The client may be gone before that is done: then nothing
    is called.
    """
    await context.send_initial_metadata(())
    responses = call()
    if inspect.isawaitable(responses):
        await responses
        return
    async with aclosing(responses):
        async for response in responses:
            await context.write(response)
