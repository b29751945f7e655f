"""The transports of MCP: a program's pipes or streamable HTTP, how fast a server may speak, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Self, TypeAlias

import anyio
import httpx2
import mcp.types
import msgspec
import pydantic
from anyio.abc import ObjectSendStream
from anyio.streams.memory import MemoryObjectReceiveStream
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from pawl.chassis.clock import Clock
from pawl.tool_registry.adapters.mcp.program import BRACKETS_MAX, MESSAGE_BYTES_MAX, Program, brackets_in

# What nobody has asked for: requests and notifications of the server.
_UNASKED_BURST: Final = 1000
_UNASKED_PER_SECOND: Final = 200
# Whatever a server sends takes time to be read, in which nobody else is served: a message as much as so many bytes of
# a text, and a bracket, and a line.
_BYTES_BURST: Final = 64 * 1024 * 1024
_BYTES_PER_SECOND: Final = 8 * 1024 * 1024
_BYTES_OF_MESSAGE: Final = 4096
_BYTES_OF_BRACKET: Final = 32
_BYTES_OF_LINE: Final = 64
# Streams that a server ends are asked for again, when it says so and as often as it says.
_STREAMS_BURST: Final = 20
_STREAMS_PER_SECOND: Final = 1
_STALL_SECONDS: Final = 10.0
_WRITES_MAX: Final = 64
_GARBAGE_LINES_MAX: Final = 100
_SESSION_ID: Final = "mcp-session-id"
# In the words of the package that reads JSON.
_TOO_DEEP: Final = "recursion limit"
_NO_SUCH_METHOD: Final = b"-32601"
_EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_END_BYTES: Final = 3
# A server may be silent for as long as a call may take, whose own limit ends it, and that stands still while the user
# is asked something, for days perhaps.
_TIMEOUT: Final = httpx2.Timeout(30.0, read=None)


class Wire:
    """The state of a transport. Its problem is empty while it goes on, and where its end was asked for."""

    def __init__(self) -> None:
        self.problem = ""
        self.is_too_large = False
        """True if it ended because a message was too large."""
        self.was_used = False
        """True if calls went over it: what the program wrote last may be about what somebody sent."""
        self.is_forgotten = False
        """True if the server has said that it does not know the session, of a message that it has not looked at."""
        self.refusal = ""
        """The reason for which the server refuses all requests over HTTP; empty if it does not."""
        self.news = asyncio.Event()
        """Set when there is something to do: the end, or what its owner sets it for."""

    def end(self, problem: str, *, is_too_large: bool = False) -> None:
        """Say why; the first reason stays."""
        self.is_too_large = self.is_too_large or (is_too_large and not self.problem)
        self.problem = self.problem or problem
        self.news.set()


class Pace:
    """A rate that something keeps after a burst."""

    def __init__(self, burst: int, per_second: int, clock: Clock) -> None:
        self._burst = burst
        self._per_second = per_second
        self._clock = clock
        self._left = float(burst)
        self._seen_at = clock.monotonic()

    async def keep(self, amount: float = 1) -> None:
        """Return when so much more may be."""
        now = self._clock.monotonic()
        self._left = min(self._left + (now - self._seen_at) * self._per_second, self._burst) - amount
        self._seen_at = now
        if self._left < 0:
            await self._clock.sleep(-self._left / self._per_second)


def _reading(clock: Clock) -> Pace:
    return Pace(_BYTES_BURST, _BYTES_PER_SECOND, clock)


def _effort(data: bytes, messages: int) -> int:
    """Return what it takes to read a part of what a server sends, in bytes of a text."""
    lines = data.count(b"\n") + data.count(b"\r")
    weights = messages * _BYTES_OF_MESSAGE + brackets_in(data) * _BYTES_OF_BRACKET + lines * _BYTES_OF_LINE
    return len(data) + weights


class Paced:
    """A stream of incoming messages that lets a server speak only so fast; what it says beyond that waits with it."""

    def __init__(self, stream: Any, clock: Clock) -> None:
        self._stream = stream
        self._pace = Pace(_UNASKED_BURST, _UNASKED_PER_SECOND, clock)

    @property
    def last_context(self) -> Any:
        """The context of the sender of the last message, if the transport keeps it."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        return await self._passed(await self._stream.receive())

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return await self._passed(await self._stream.__anext__())

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> bool | None:
        handled: bool | None = await self._stream.__aexit__(*error)
        return handled

    async def _passed(self, item: SessionMessage | Exception) -> SessionMessage | Exception:
        unasked = mcp.types.JSONRPCRequest | mcp.types.JSONRPCNotification
        if isinstance(item, SessionMessage) and isinstance(item.message, unasked):
            await self._pace.keep()
        answer = item.message if isinstance(item, SessionMessage) else None
        if isinstance(answer, mcp.types.JSONRPCResponse) and isinstance(answer.result.get("task"), dict):
            # The package takes the beginning of a task for a result of a call that lacks its content.
            answer.result.setdefault("content", [])
        return item


Streams: TypeAlias = tuple[Paced, Any]
"""From the server and to it."""


@asynccontextmanager
async def stdio_transport(program: Program, wire: Wire, clock: Clock) -> AsyncGenerator[Streams, None]:
    """Start a program and give the streams to it, a message a line. `wire` says why they ended.

    The package's own transport keeps a line of any length, and does not limit what it starts.

    Raises:
        ProgramProblem: it cannot be started.
    """
    async with program:
        incoming, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write_stream, outgoing = anyio.create_memory_object_stream[SessionMessage](_WRITES_MAX)
        tasks = [
            asyncio.create_task(_read(program, wire, incoming, _reading(clock)), name="mcp.read"),
            asyncio.create_task(_write(program, wire, outgoing, incoming), name="mcp.write"),
        ]
        try:
            yield Paced(read_stream, clock), write_stream
        finally:
            for task in tasks:
                task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (incoming, read_stream, write_stream, outgoing):
                stream.close()


async def _read(
    program: Program, wire: Wire, incoming: ObjectSendStream[SessionMessage | Exception], pace: Pace
) -> None:
    """Pass messages on, line by line, until the program's output ends or cannot be borne any longer."""
    garbage = 0
    async with incoming:
        while garbage <= _GARBAGE_LINES_MAX:
            try:
                line = await program.stdout.readline()
            except ValueError:
                wire.end(f"it sent a message of more than {MESSAGE_BYTES_MAX} bytes", is_too_large=True)
                return
            if brackets_in(line) > BRACKETS_MAX:
                wire.end(f"it sent a message of more than {BRACKETS_MAX} brackets", is_too_large=True)
                return
            await pace.keep(_effort(line, 1))
            if not line:
                wire.end(await program.obituary(with_words=not wire.was_used))
                return
            try:
                message = mcp.types.jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError as error:
                if _is_too_deep(error):
                    wire.end("it sent a message that is nested too deeply", is_too_large=True)
                    return
                garbage += bool(line.strip())
                # A buffer full of such lines is read without a wait.
                await asyncio.sleep(0)
                continue
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await incoming.send(SessionMessage(message))
        wire.end("it writes to its standard output what is no message of MCP")


def _is_too_deep(error: ValueError) -> bool:
    """Return whether a line was JSON that is nested deeper than it is read: it may be the answer to any call."""
    problems = error.errors(include_input=False) if isinstance(error, pydantic.ValidationError) else ()
    return any(_TOO_DEEP in str(each.get("ctx", {}).get("error", "")) for each in problems)


async def _write(
    program: Program,
    wire: Wire,
    outgoing: MemoryObjectReceiveStream[SessionMessage],
    incoming: ObjectSendStream[SessionMessage | Exception],
) -> None:
    """Send messages, each a line, until the program does not take them any more."""
    async with outgoing:
        async for message in outgoing:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                async with asyncio.timeout(_STALL_SECONDS):
                    program.stdin.write(text.encode() + b"\n")
                    await program.stdin.drain()
            except TimeoutError:
                wire.end(f"it has not read what it was sent for {_STALL_SECONDS:g} s")
                await incoming.aclose()
                return
            except (OSError, RuntimeError):
                return  # It is gone; the reader says so.


@asynccontextmanager
async def http_transport(
    client: httpx2.AsyncClient, url: str, headers: Mapping[str, str], wire: Wire, clock: Clock
) -> AsyncGenerator[Streams, None]:
    """Give the streams to a server; closes `client` at the end. `wire` is told of a body that is too large.

    Headers go to the origin of `url` only: the transport follows no redirect that leaves it.
    """
    client.headers.update(headers)
    # What is compressed could be any size when it is not.
    client.headers["Accept-Encoding"] = "identity"
    client.timeout = _TIMEOUT
    streams = Pace(_STREAMS_BURST, _STREAMS_PER_SECOND, clock)
    limits = [partial(_limit, wire, _reading(clock)), partial(_note_forgotten, wire), partial(_note_refusal, wire)]
    client.event_hooks = {
        "request": [*client.event_hooks["request"], partial(_limit_request, streams)],
        "response": [*client.event_hooks["response"], *limits],
    }
    async with (
        client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MESSAGE_BYTES_MAX) as (read, write),
    ):
        yield Paced(read, clock), write


async def _limit(wire: Wire, pace: Pace, response: httpx2.Response) -> None:
    """Limit a body that is read as a whole, and the brackets of events. Those have a limit of bytes already."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise httpx2.DecodingError("it sent a compressed body, which nobody asked for", request=response.request)
    # Bodies of errors and redirects are read as a whole, too, whatever they say they are.
    is_stream = response.is_success and response.headers.get("content-type", "").lower().startswith("text/event-stream")
    if isinstance(response.stream, httpx2.AsyncByteStream):
        response.stream = _Limited(response.stream, response.request, wire, pace, is_stream=is_stream)


class _Message(msgspec.Struct):
    """The parts that only a request has both of."""

    id: Any = None
    method: str = ""


async def _limit_request(streams: Pace, request: httpx2.Request) -> None:
    """Keep the pace of streams, and limit the wait for what has no answer: all that is sent later waits with it."""
    if request.method == "GET":
        await streams.keep()
        return
    message = msgspec.json.decode(request.content, type=_Message) if request.content else _Message()
    if message.id is None or not message.method:
        timeout = {**request.extensions.get("timeout", {}), "read": _STALL_SECONDS}
        request.extensions = {**request.extensions, "timeout": timeout}


async def _note_forgotten(wire: Wire, response: httpx2.Response) -> None:
    """Note that the session is unknown, as the protocol says it; the package passes on only what the body says."""
    request = response.request
    if response.status_code != httpx2.codes.NOT_FOUND or request.method != "POST" or _SESSION_ID not in request.headers:
        return
    if _NO_SUCH_METHOD not in await response.aread():
        wire.is_forgotten = True
        response.headers["Content-Type"] = "text/plain"


async def _note_refusal(wire: Wire, response: httpx2.Response) -> None:
    status = response.status_code
    if status in {httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN}:
        what = "a key is missing or wrong" if status == httpx2.codes.UNAUTHORIZED else "it does not permit this"
        wire.refusal = f"it answers with status {status}: {what}; `pawl sources add-mcp` sends one by --secret-header"


class _Limited(httpx2.AsyncByteStream):
    """A body whose one message, or each of whose events, is not too large."""

    def __init__(
        self, stream: httpx2.AsyncByteStream, request: httpx2.Request, wire: Wire, pace: Pace, *, is_stream: bool
    ) -> None:
        self._stream = stream
        self._is_stream = is_stream
        self._wire = wire
        self._pace = pace
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = brackets = 0
        end = b""  # Of the data before: the end of an event may be cut in two.
        async for data in self._stream:
            size += 0 if self._is_stream else len(data)
            events = [brackets_in(part) for part in (_EVENT_END.split(end + data) if self._is_stream else [data])]
            events[0] += brackets
            brackets, end = events[-1], data[-_END_BYTES:]
            if size > MESSAGE_BYTES_MAX or max(events) > BRACKETS_MAX:
                problem = f"it sent a message of more than {MESSAGE_BYTES_MAX} bytes or {BRACKETS_MAX} brackets"
                self._wire.end(problem, is_too_large=True)
                raise httpx2.ReadError(problem, request=self._request)
            await self._pace.keep(_effort(data, len(events) - 1))
            yield data

    async def aclose(self) -> None:
        await self._stream.aclose()
