"""Provides HTTP/1.1 connections to the model server (asyncio and llhttp), a pool for them, and a circuit breaker."""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, cast

import aiohappyeyeballs
import httptools
from aiohappyeyeballs import AddrInfoType

from pawl.agent_loop.loop.rules.run import FailureClass
from pawl.agent_loop.model import failure
from pawl.agent_loop.model.request import UNAVAILABLE, ModelError, ModelPort, ModelRequest, Piece, Problem
from pawl.chassis.egress.addresses import look_up
from pawl.chassis.process.tasks import shield

# Maximum consecutive bytes that are not part of a body: heads (also informational ones), trailers and chunk sizes.
HEAD_BYTES_MAX: Final = 128 * 1024

# At this many unread bytes, the server must wait for a slow reader.
_UNREAD_BYTES_MAX: Final = 1024 * 1024

_INFORMATIONAL: Final = range(100, 200)


class Connection(asyncio.Protocol):
    """Sends one request at a time and reads its response.

    `status` and `headers` are set once `send` has returned; `fields` holds the headers by lower-case name. `reusable`
    means that the response was read and the connection can take another request. Times are by the event loop's clock.
    If a wait is cancelled, the caller must close the connection.
    """

    def __init__(self, on_lost: Callable[[Connection], None]) -> None:
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        # Accept what h11 accepted: bare line feeds, and a content length along with chunks.
        self._parser.set_dangerous_leniencies(
            lenient_optional_cr_before_lf=True, lenient_chunked_length=True, lenient_spaces_after_chunk_size=True
        )
        self._transport: asyncio.Transport | None = None
        self._poll: select.poll | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._wait_until: float | None = None
        self._closed = False
        self._fault: Problem | None = None
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.fields: dict[bytes, bytes] = {}
        self._has_head = False
        self._ends_with_connection = False
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._paused = False
        self._bytes_without_body = 0
        self._complete = False
        self._keep_alive = False

    # Methods that the owner calls.

    @property
    def reusable(self) -> bool:
        """True if the connection can take another request, as far as is known without a system call."""
        is_read = self._complete and not self._body and not self._paused
        return is_read and self._keep_alive and not self._closed and not self._sending()

    def is_alive(self) -> bool:
        """Return whether an idle connection is usable: the server has neither closed it nor sent data."""
        return not self._closed and self._poll is not None and not self._poll.poll(0)

    async def send(self, request: bytes) -> None:
        """Send a request. Return once the head of its response has arrived.

        Raises:
            ModelError: NETWORK
        """
        if self._complete:
            self._reset()
        if self._transport is None or self._closed:
            raise ModelError(failure.NETWORK)
        self._transport.write(request)
        while not self._has_head:
            if self._fault is not None:
                raise ModelError(failure.NETWORK)
            await self._wait(None)

    async def read(self, *, until: float | None = None) -> bytes | None:
        """Return the body bytes that have arrived, at least one, or None at the end.

        Raises:
            TimeoutError: nothing arrived before `until`.
            ModelError: STREAM_TRUNCATED or NETWORK
        """
        while not self._body:
            if self._complete:
                return None
            if self._fault is not None:
                raise ModelError(self._fault)
            await self._wait(until)
        body, self._body = self._body, []
        self._body_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return body[0] if len(body) == 1 else b"".join(body)

    def close(self) -> None:
        """Close the connection immediately. Idempotent."""
        self._closed = True
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    def _sending(self) -> bool:
        return self._transport is None or self._transport.get_write_buffer_size() > 0

    async def _wait(self, until: float | None) -> None:
        # One timer serves many waits, because timeouts are rare.
        self._wait_until = until
        if until is not None and (self._timer is None or self._timer_at > until):
            self._start_timer(until)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _start_timer(self, at: float) -> None:
        self._stop_timer()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._on_time)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done() or self._wait_until is None:
            return
        if self._wait_until > self._timer_at:
            self._start_timer(self._wait_until)
        else:
            self._waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Methods that the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        self._bytes_without_body += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._break(failure.TRUNCATED)
        if self._bytes_without_body > HEAD_BYTES_MAX:
            self._break(failure.TRUNCATED)
        if self._body_bytes > _UNREAD_BYTES_MAX and not self._paused and not self._closed:
            self._paused = True
            cast("asyncio.Transport", self._transport).pause_reading()
        self._wake()

    def eof_received(self) -> None:
        """End a response that has no length and lasts until the connection closes. The transport closes itself."""
        self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if error is None:
            self._end()
        self._break(failure.NETWORK)
        self._wake()
        self._transport = None
        self._on_lost(self)

    def _end(self) -> None:
        if self._has_head and self._ends_with_connection:
            self._complete = True
        self._break(failure.TRUNCATED)
        self._wake()

    def _break(self, fault: Problem) -> None:
        """Record a fault and close the connection. A complete response or an earlier fault is kept."""
        self._fault = self._fault or fault
        self.close()

    # Methods that the parser calls.

    def on_message_begin(self) -> None:
        """Refuse a second response to one request."""
        if self._complete:
            raise httptools.HttpParserError("a second response")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status in _INFORMATIONAL:
            self.headers = []
            return
        self.status = status
        self._has_head = True
        self.fields = {name.lower(): value for name, value in self.headers}
        chunked = self.fields.get(b"transfer-encoding", b"").lower().rstrip().endswith(b"chunked")
        self._ends_with_connection = not chunked and b"content-length" not in self.fields

    def on_body(self, body: bytes) -> None:
        self._bytes_without_body = 0
        self._body.append(body)
        self._body_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()


# Maximum number of connections. Further callers wait for one to become free.
CONNECTIONS_MAX: Final = 1000

IDLE_MAX: Final = 100

IDLE_SECONDS: Final = 60.0

_NEXT_ADDRESS_SECONDS: Final = 0.25  # RFC 8305, 5: the delay between attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The model server's address. `tls` is None for plain HTTP."""

    host: str
    port: int
    tls: ssl.SSLContext | None


class Pool:
    """A connection pool. It reuses the most recently used connection, so that surplus connections time out."""

    def __init__(self, origin: Origin, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._origin = origin
        self._idle_seconds = idle_seconds
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)
        # Idle connections by expiry time, oldest first.
        self._idle: dict[Connection, float] = {}
        self._open: set[Connection] = set()
        self._lookup: asyncio.Future[Sequence[AddrInfoType]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()
        self._closed = False

    async def take(self) -> Connection:
        """Return an open connection. Pass it to `give` after use.

        Raises:
            ModelError: NETWORK
        """
        await self._slots.acquire()
        try:
            while self._idle:
                connection, _ = self._idle.popitem()
                if connection.is_alive():
                    return connection
                connection.close()
            return await self._connect()
        except BaseException:
            self._slots.release()
            raise

    def give(self, connection: Connection) -> None:
        """Return a connection to the pool. It is closed if it is not reusable or the pool is full or closed."""
        self._slots.release()
        if self._closed or not connection.reusable or len(self._idle) >= IDLE_MAX:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        self._idle[connection] = loop.time() + self._idle_seconds
        if self._timer is None:
            self._timer = loop.call_later(self._idle_seconds, self._sweep, loop.time)

    async def close(self) -> None:
        """Close all connections, including those in use, and wait until they are closed."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for connection in self._open:
            connection.close()
        while self._open:
            self._emptied.clear()
            await self._emptied.wait()

    async def _connect(self) -> Connection:
        loop, origin = asyncio.get_running_loop(), self._origin
        try:
            addresses = await self._addresses()
            connected = await aiohappyeyeballs.start_connection(
                addresses, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS, loop=loop
            )
            try:
                _, connection = await loop.create_connection(
                    lambda: Connection(self._lost),
                    sock=connected,
                    ssl=origin.tls,
                    server_hostname=origin.host if origin.tls else None,
                )
            except BaseException:
                connected.close()
                raise
        except OSError:
            raise ModelError(failure.NETWORK) from None
        self._open.add(connection)
        return connection

    async def _addresses(self) -> Sequence[AddrInfoType]:
        """Return the model server's addresses. Concurrent callers share one lookup."""
        if self._lookup is None:
            self._lookup = asyncio.ensure_future(look_up(self._origin.host, self._origin.port))
            self._lookup.add_done_callback(self._lookup_done)
        return await shield(self._lookup)

    def _lookup_done(self, _: asyncio.Future[Sequence[AddrInfoType]]) -> None:
        self._lookup = None

    def _lost(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._open.discard(connection)
        if not self._open:
            self._emptied.set()

    def _sweep(self, now: Callable[[], float]) -> None:
        self._timer = None
        for connection, expires_at in list(self._idle.items()):
            if expires_at > now():
                self._timer = asyncio.get_running_loop().call_at(expires_at, self._sweep, now)
                return
            del self._idle[connection]
            connection.close()


_FAILURES_MAX: Final = 10
_PAUSE_SECONDS: Final = 10.0


class Breaker:
    """A circuit breaker for a model server.

    After 10 outages in a row, calls fail immediately with PROVIDER_UNAVAILABLE, except for one every 10 s. The first
    other outcome closes the circuit. A rate limit does not count as an outage (see `Problem.is_outage`).
    """

    def __init__(self, model: ModelPort, monotonic: Callable[[], float]) -> None:
        self._model = model
        self._monotonic = monotonic
        self._failures = 0
        self._closed_until = 0.0

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Piece, None]:
        self._enter(request)
        try:
            async with aclosing(self._model.stream(request)) as pieces:
                async for piece in pieces:
                    self._failures = 0
                    yield piece
        except ModelError as error:
            if error.problem.is_outage and error.problem.failure_class is not FailureClass.RATE:
                self._failures += 1
                self._closed_until = self._monotonic() + _PAUSE_SECONDS
            else:
                self._failures = 0
            raise

    def _enter(self, request: ModelRequest) -> None:
        now = self._monotonic()
        if self._failures < _FAILURES_MAX:
            return
        if now < self._closed_until:
            message = (
                f"The model server has not answered {self._failures} calls in a row. It will be tried again later."
            )
            left = self._closed_until - now
            raise ModelError(Problem(reason=UNAVAILABLE, message=message, retry_after_seconds=left))
        # Other calls wait for this one to end.
        self._closed_until = now + request.headers_timeout_seconds
