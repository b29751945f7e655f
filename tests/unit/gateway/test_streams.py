"""Streams of server-sent events, and clients that stop reading."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from pawl.gateway.login.callers import Callers
from pawl.gateway.metrics import Counters
from pawl.gateway.services import Services
from pawl.gateway.web import streams
from pawl.gateway.web.streams import Event, Streams
from pawl.server.process import http_server as server
from pawl.server.process.metrics import Metrics
from tests.unit.gateway.conftest import Listener


@dataclass
class Message:
    text: str
    events: list[Message] = field(default_factory=list)
    seq: int = 1

    def HasField(self, _: str) -> bool:
        return False


class Source:
    def __init__(self) -> None:
        self.more: asyncio.Queue[str] = asyncio.Queue()
        self.readers = 0

    async def watch(self, *_: object) -> AsyncGenerator[Message, None]:
        self.readers += 1
        try:
            while True:
                text = await self.more.get()
                yield Message(text, [Message(text)])
        finally:
            self.readers -= 1


class Reader:
    def __init__(self, opened: Streams, *sources: AsyncGenerator[Event, None]) -> None:
        self.sent: asyncio.Queue[bytes] = asyncio.Queue()
        self.left = asyncio.Event()
        self.on_leave_calls = 0
        self.headers: list[tuple[bytes, bytes]] = []
        response: Any = opened.respond(*sources, on_leave=self._on_leave)
        self.serving = asyncio.create_task(response({"method": "POST"}, self._receive, self._send))

    async def _receive(self) -> dict[str, str]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.headers = message.get("headers", self.headers)
        if message.get("body"):
            await self.sent.put(message["body"])

    async def _on_leave(self) -> None:
        self.on_leave_calls += 1


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(streams, "write", lambda message: {"text": message.text})
    return Source()


def opened(closing: asyncio.Event | None = None) -> Streams:
    counters = Counters(Metrics("gateway"))
    no_callers, nothing = cast("Callers", None), cast("Services", None)
    return Streams(no_callers, nothing, counters, closing or asyncio.Event(), streams_max=10)


async def test_an_idle_stream_is_kept_open_and_unbuffered(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 0.001)
    async with asyncio.timeout(60):
        reader = Reader(opened(), streams._events(source.watch()))
        assert await reader.sent.get() == b":\n\n"
        await source.more.put("the log")
        while b"the log" not in await reader.sent.get():
            pass
        reader.left.set()
        await reader.serving
    headers = dict(reader.headers)
    content_type, *_ = headers[b"content-type"].split(b";")
    assert (headers[b"x-accel-buffering"], content_type) == (b"no", b"text/event-stream")


async def test_streams_end_at_shutdown_even_if_their_reader_is_stuck(source: Source) -> None:
    closing = asyncio.Event()
    found = opened(closing)
    async with asyncio.timeout(60):
        idle, stuck = (Reader(found, streams._events(source.watch())) for _ in range(2))
        stuck.sent = asyncio.Queue(1)
        stuck.sent.put_nowait(b"")
        for text in ("to either", "to the other"):
            await source.more.put(text)
        assert b"to" in await idle.sent.get()
        closing.set()
        await asyncio.gather(idle.serving, stuck.serving)
    assert (idle.on_leave_calls, stuck.on_leave_calls, source.readers) == (0, 0, 0)


REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def reader(address: str, request: bytes, trusting: ssl.SSLContext | None, *, buffer_bytes: int = 4096) -> socket.socket:
    host, _, port = address.rpartition(":")
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    found.connect((host, int(port)))
    if trusting is not None:
        found = trusting.wrap_socket(found, server_hostname=host)
    found.sendall(request)
    return found


@pytest.mark.parametrize(
    ("request_", "parts"), [(REQUEST, 1), (REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), 1000)]
)
async def test_a_client_that_stops_reading_is_disconnected(
    listener: Listener, monkeypatch: pytest.MonkeyPatch, request_: bytes, parts: int
) -> None:
    monkeypatch.setattr(server, "_TAKE_SECONDS", 0.2)
    part = bytes(16_000_000 // parts)
    ended = asyncio.Event()

    async def app(_: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(parts):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        ended.set()

    async with listener.serve(app) as found:
        with contextlib.closing(await asyncio.to_thread(reader, found.address, request_, listener.trusting)):
            await ended.wait()
            while found._server.server_state.connections:  # open connections are visible only here
                await asyncio.sleep(0.01)


async def test_a_dead_connection_ends_within_40_seconds(listener: Listener) -> None:
    """NOTE-1: the test drops no packets; it checks the socket options for idle connections and unacknowledged data."""
    started = asyncio.Event()

    async def app(_: Any, receive: Any, __: Any) -> None:
        started.set()
        await receive()
        await receive()

    async with listener.serve(app) as found:
        with contextlib.closing(await asyncio.to_thread(reader, found.address, REQUEST, listener.trusting)):
            await started.wait()
            (protocol,) = found._server.server_state.connections
            accepted = protocol.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            idle, interval, count, sent = (
                accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names
            )
            assert (idle + interval * count, sent) == (40, 40_000)


async def test_a_slow_client_gets_the_whole_response(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reads 0.5 MiB between two checks. The kernel accepts more data only after a larger part was read."""
    monkeypatch.setattr(server, "_TAKE_SECONDS", 0.001)
    size, step, count = 16_000_000, 512 * 1024, 0
    steps = threading.Semaphore(0)
    check_later, check = server._Protocol._check_later, server._Protocol._check

    def check_after_step(protocol: Any) -> None:
        check_later(protocol)
        protocol.due = count + step
        steps.release()

    def check_when_due(protocol: Any, left: int) -> None:
        if count < protocol.due:
            protocol._stuck = protocol.loop.call_later(0.001, protocol._check, left)
        else:
            check(protocol, left)

    monkeypatch.setattr(server._Protocol, "_check_later", check_after_step)
    monkeypatch.setattr(server._Protocol, "_check", check_when_due)

    async def app(_: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(size)})
        steps.release(size // step + 1)

    def read(address: str) -> None:
        nonlocal count
        with contextlib.closing(reader(address, REQUEST, listener.trusting, buffer_bytes=65536)) as found:
            data = b" "
            while count < size and data and steps.acquire(timeout=60):
                end = min(count + step, size)
                while count < end and (data := found.recv(16384)):
                    count += len(data)

    async with listener.serve(app) as found:
        await asyncio.to_thread(read, found.address)
    assert count >= size
