"""The four kinds of RPC, brought to one: raw bytes in, parsed by us.

`read_raw` turns a handler as generated code registers it into a function that
reads its request or requests by itself, whatever the kind and whether the
servicer's method is a coroutine or an async generator, iterates over its
requests or reads them. To grpc.aio each of them is a stream in both directions:
that is the only kind of which it reads nothing before it is asked to.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, Final, Self, TypeAlias

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
    return _KINDS[handler.request_streaming, handler.response_streaming](handler, parse, receive)


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


class _Requests:
    """The requests of a stream, parsed as they are read; a context manager that ends the reading."""

    def __init__(self, raw: AsyncIterator[bytes], parse: Parser) -> None:
        self._source = raw
        self._raw: AsyncIterator[bytes] | None = None
        self._parse = parse

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if isinstance(self._raw, AsyncGenerator):
            # A task that the servicer left behind may still be reading.
            with suppress(RuntimeError):
                await self._raw.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._raw is None:
            # Not before: a servicer that reads from its context must not have an iterator too.
            self._raw = aiter(self._source)
        return self._parse(await anext(self._raw))


class _ParsingContext:
    """A context whose `read` parses; anything else is the context's own."""

    def __init__(self, context: Context, parse: Parser) -> None:
        self._context = context
        self._parse = parse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        raw = await self._context.read()
        return raw if raw is grpc.aio.EOF else self._parse(raw)


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


def _unary_unary(handler: Handler, parse: Parser, receive: Receive) -> Behaviour:
    inner: Any = handler.unary_unary

    async def run(_: AsyncIterator[bytes], context: Context) -> Any:
        return await inner(parse(await receive(context)), context)

    return run


def _unary_stream(handler: Handler, parse: Parser, receive: Receive) -> Behaviour:
    inner: Any = handler.unary_stream

    async def run(_: AsyncIterator[bytes], context: Context) -> None:
        request = parse(await receive(context))
        await _send(lambda: inner(request, context), context)

    return run


def _stream_unary(handler: Handler, parse: Parser, _: Receive) -> Behaviour:
    inner: Any = handler.stream_unary

    async def run(raw: AsyncIterator[bytes], context: Context) -> Any:
        async with _Requests(raw, parse) as requests:
            return await inner(requests, _ParsingContext(context, parse))

    return run


def _stream_stream(handler: Handler, parse: Parser, _: Receive) -> Behaviour:
    inner: Any = handler.stream_stream

    async def run(raw: AsyncIterator[bytes], context: Context) -> None:
        async with _Requests(raw, parse) as requests:
            await _send(lambda: inner(requests, _ParsingContext(context, parse)), context)

    return run


_KINDS: Final[dict[tuple[bool, bool], Callable[[Handler, Parser, Receive], Behaviour]]] = {
    (False, False): _unary_unary,
    (False, True): _unary_stream,
    (True, False): _stream_unary,
    (True, True): _stream_stream,
}
