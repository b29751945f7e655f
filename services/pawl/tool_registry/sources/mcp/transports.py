"""MCP's transports (a program's pipes, and streamable HTTP), with limits on the server's output."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeAlias

import anyio
import httpx2
import mcp.types
import msgspec
from anyio.abc import ObjectSendStream
from anyio.streams.memory import MemoryObjectReceiveStream
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from pawl.chassis.process.clock import Clock
from pawl.tool_registry.sources.mcp.program import BRACKETS_MAX, MESSAGE_BYTES_MAX, ServerProgram, brackets_in, running
from pawl.tool_registry.sources.mcp.sandbox import Order

# Parsing blocks the process. The costs of a message, a bracket and a line are given in bytes of plain text. The rate
# allows about 200 messages per second.
_BYTES_BURST: Final = 64 * 1024 * 1024
_BYTES_PER_SECOND: Final = 8 * 1024 * 1024
_BYTES_OF_MESSAGE: Final = 40 * 1024
_BYTES_OF_BRACKET: Final = 32
_BYTES_OF_LINE: Final = 64
# The package immediately reopens a stream that the server ends, so the rate is limited here.
_STREAMS_BURST: Final = 20
_STREAMS_PER_SECOND: Final = 1
_STALL_SECONDS: Final = 10.0
_WRITES_MAX: Final = 64
_GARBAGE_LINES_MAX: Final = 100
_SESSION_ID: Final = "mcp-session-id"
# Error text of the JSON parser.
_TOO_DEEP: Final = "recursion limit"
_NOT_MCP: Final = "it writes invalid MCP messages to its standard output"
_NO_SUCH_METHOD: Final = b"-32601"
_EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_END_BYTES: Final = 3
# There is no read timeout: the call's timeout applies, and its clock stops while the user is being asked.
_TIMEOUT: Final = httpx2.Timeout(30.0, read=None)


class Wire:
    """The state of a transport. `problem` is empty while the transport is working, and after it is ended on purpose."""

    def __init__(self) -> None:
        self.problem = ""
        # True if it ended because a message was too large.
        self.is_too_large = False
        # True if calls were sent, which means that the program's last output may contain a user's data.
        self.was_used = False
        # True if the server answered that it does not know the session, so it has not processed the message.
        self.is_forgotten = False
        # The reason why the server refuses HTTP requests; empty if it does not.
        self.refusal = ""
        # Set if a program writes invalid messages, which may explain why a response is missing.
        self.noise = ""
        # Set when the transport ends, and by the owner for other reasons.
        self.news = asyncio.Event()

    def end(self, problem: str, *, is_too_large: bool = False) -> None:
        """Record why the transport ended. Only the first reason counts."""
        self.is_too_large = self.is_too_large or (is_too_large and not self.problem)
        self.problem = self.problem or problem
        self.news.set()


class RateLimit:
    def __init__(self, burst: int, per_second: int, clock: Clock) -> None:
        self._burst = burst
        self._per_second = per_second
        self._clock = clock
        self._left = float(burst)
        self._seen_at = clock.monotonic()

    async def wait(self, amount: float = 1) -> None:
        now = self._clock.monotonic()
        self._left = min(self._left + (now - self._seen_at) * self._per_second, self._burst) - amount
        self._seen_at = now
        if self._left < 0:
            await self._clock.sleep(-self._left / self._per_second)


def parse_cost(data: bytes, messages: int) -> int:
    """Return the cost of parsing a server's data, as the number of bytes of plain text that would cost the same."""
    lines = data.count(b"\n") + data.count(b"\r")
    weights = messages * _BYTES_OF_MESSAGE + brackets_in(data) * _BYTES_OF_BRACKET + lines * _BYTES_OF_LINE
    return len(data) + weights


# The stream from the server, and the stream to it.
Streams: TypeAlias = tuple[Any, Any]


@asynccontextmanager
async def stdio_transport(
    order: Order, *, name: str, secrets: Collection[str], wire: Wire, clock: Clock
) -> AsyncGenerator[Streams, None]:
    """Run a program and return its streams, with one message per line. `wire` records why the streams ended.

    The package's own transport buffers lines of any length, and does not confine the program.

    Raises:
        ProgramProblem: The program cannot be started.
    """
    async with running(order, name=name, secrets=secrets) as program:
        incoming, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write_stream, outgoing = anyio.create_memory_object_stream[SessionMessage](_WRITES_MAX)
        rate_limit = RateLimit(_BYTES_BURST, _BYTES_PER_SECOND, clock)
        tasks = [
            asyncio.create_task(_read(program, wire, incoming, rate_limit), name="mcp.read"),
            asyncio.create_task(_write(program, wire, outgoing, incoming), name="mcp.write"),
        ]
        try:
            yield read_stream, write_stream
        finally:
            for task in tasks:
                task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (incoming, read_stream, write_stream, outgoing):
                stream.close()


async def _read(
    program: ServerProgram, wire: Wire, incoming: ObjectSendStream[SessionMessage | Exception], rate_limit: RateLimit
) -> None:
    """Forward messages until the program's output ends or exceeds a limit."""
    garbage = 0
    async with incoming:
        while garbage <= _GARBAGE_LINES_MAX:
            try:
                line = await program.stdout.readline()
            except ValueError:
                wire.end(f"it sent a message of more than {MESSAGE_BYTES_MAX} bytes", is_too_large=True)
                return
            if brackets_in(line) > BRACKETS_MAX:
                wire.end(f"it sent a message with more than {BRACKETS_MAX} brackets", is_too_large=True)
                return
            await rate_limit.wait(parse_cost(line, 1))
            if not line:
                wire.end(await program.end_reason(with_output=not wire.was_used))
                return
            try:
                message = mcp.types.jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError as error:
                if _TOO_DEEP in str(error):  # This may be the answer to any call.
                    wire.end("it sent a message that is nested too deeply", is_too_large=True)
                    return
                if line.strip():
                    garbage += 1
                    wire.noise = _NOT_MCP
                # Yield to the event loop, because buffered lines are read without waiting.
                await asyncio.sleep(0)
                continue
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await incoming.send(SessionMessage(message))
        wire.end(_NOT_MCP)


async def _write(
    program: ServerProgram,
    wire: Wire,
    outgoing: MemoryObjectReceiveStream[SessionMessage],
    incoming: ObjectSendStream[SessionMessage | Exception],
) -> None:
    async with outgoing:
        async for message in outgoing:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                async with asyncio.timeout(_STALL_SECONDS):
                    program.stdin.write(text.encode() + b"\n")
                    await program.stdin.drain()
            except TimeoutError:
                wire.end(f"it has not read its input for {_STALL_SECONDS:g} s")
                await incoming.aclose()
                return
            except (OSError, RuntimeError):
                return  # The program has ended; `_read` reports that.


@asynccontextmanager
async def http_transport(
    client: httpx2.AsyncClient, url: str, headers: Mapping[str, str], wire: Wire, clock: Clock
) -> AsyncGenerator[Streams, None]:
    """Return the streams to and from a server. `client` is closed on exit.

    Headers are sent only to the origin of `url`, because the transport does not follow redirects to other origins.
    """
    client.headers.update(headers)
    # A compressed body could expand to any size.
    client.headers["Accept-Encoding"] = "identity"
    client.timeout = _TIMEOUT
    body_rate = RateLimit(_BYTES_BURST, _BYTES_PER_SECOND, clock)
    stream_rate = RateLimit(_STREAMS_BURST, _STREAMS_PER_SECOND, clock)
    client.event_hooks = {
        "request": [*client.event_hooks["request"], partial(limit_request, stream_rate)],
        "response": [
            *client.event_hooks["response"],
            partial(_limit_body, wire, body_rate),
            partial(_note_status, wire),
            partial(_check_id, wire),
        ],
    }
    async with (
        client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MESSAGE_BYTES_MAX) as (read, write),
    ):
        yield read, write


async def limit_request(stream_rate: RateLimit, request: httpx2.Request) -> None:
    """Limit the rate of new streams, and how long a message without a response may delay later messages."""
    if request.method == "GET":
        await stream_rate.wait()
    elif not {"id", "method"} <= msgspec.json.decode(request.content or b"{}").keys():
        timeout = {**request.extensions.get("timeout", {}), "read": _STALL_SECONDS}
        request.extensions = {**request.extensions, "timeout": timeout}


async def _limit_body(wire: Wire, rate_limit: RateLimit, response: httpx2.Response) -> None:
    """Limit the size of a body and the number of its brackets.

    In a stream, limit the brackets of each event. The package limits event sizes.
    """
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise httpx2.DecodingError("it sent a compressed body, which was not requested", request=response.request)
    # The bodies of errors and redirects are read in full, regardless of their type.
    is_stream = response.is_success and response.headers.get("content-type", "").lower().startswith("text/event-stream")
    if isinstance(response.stream, httpx2.AsyncByteStream):
        response.stream = _Limited(response.stream, response.request, wire, rate_limit, is_stream=is_stream)


async def _note_status(wire: Wire, response: httpx2.Response) -> None:
    """Record that the server does not know the session or refuses requests.

    The `mcp` package forwards only the body.
    """
    status, request = response.status_code, response.request
    if status == httpx2.codes.NOT_FOUND and request.method == "POST" and _SESSION_ID in request.headers:
        if _NO_SUCH_METHOD not in await response.aread():
            wire.is_forgotten = True
            response.headers["Content-Type"] = "text/plain"
    elif status in {httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN}:
        what = "a key is missing or wrong" if status == httpx2.codes.UNAUTHORIZED else "permission denied"
        wire.refusal = f"it answers with status {status}: {what}; set one with `pawl sources add-mcp --secret-header`"


class _Message(msgspec.Struct):
    id: Any = None


async def _check_id(wire: Wire, response: httpx2.Response) -> None:
    """Reject a JSON response that lacks the request's id. The `mcp` package would wait for the right id forever."""
    is_json = response.headers.get("content-type", "").lower().startswith("application/json")
    if response.request.method != "POST" or not response.is_success or not is_json:
        return
    try:
        asked, answered = (
            msgspec.json.decode(body, type=_Message).id for body in (response.request.content, await response.aread())
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # The package rejects it.
    if asked is not None and answered != asked:
        wire.refusal = "its JSON answer does not have the request's id"
        response.headers["Content-Type"] = "text/plain"


class _Limited(httpx2.AsyncByteStream):
    """A rate-limited response body.

    The size and the brackets of the body (or, in a stream, of each event) are limited.
    """

    def __init__(
        self,
        stream: httpx2.AsyncByteStream,
        request: httpx2.Request,
        wire: Wire,
        rate_limit: RateLimit,
        *,
        is_stream: bool,
    ) -> None:
        self._stream = stream
        self._is_stream = is_stream
        self._wire = wire
        self._rate_limit = rate_limit
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = brackets = 0
        end = b""  # The end of the previous data: an event's end may be split.
        async for data in self._stream:
            size += 0 if self._is_stream else len(data)
            events = [brackets_in(part) for part in (_EVENT_END.split(end + data) if self._is_stream else [data])]
            events[0] += brackets
            brackets, end = events[-1], data[-_END_BYTES:]
            if size > MESSAGE_BYTES_MAX or max(events) > BRACKETS_MAX:
                problem = f"it sent a message of more than {MESSAGE_BYTES_MAX} bytes or {BRACKETS_MAX} brackets"
                self._wire.end(problem, is_too_large=True)
                raise httpx2.ReadError(problem, request=self._request)
            await self._rate_limit.wait(parse_cost(data, len(events) - 1))
            yield data

    async def aclose(self) -> None:
        await self._stream.aclose()
