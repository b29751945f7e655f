"""A process's HTTP server: the gateway's API, and every service's metrics and health pages."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import sys
import termios
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pawl.chassis.process import logs, tasks
from pawl.chassis.process.address import join_address, split_address
from pawl.chassis.process.start import StartError
from pawl.chassis.rpc.tls import Tls, http_context
from pawl.server.rpc.server import RpcServer

_HEAD_SECONDS: Final = 10.0
_HEAD_BYTES_MAX: Final = 32 * 1024
_KEEP_ALIVE_SECONDS: Final = 30
# A connection ends after this time if its peer acknowledges neither data nor keep-alive probes.
_SILENT_SECONDS: Final = 40
# A client that does not read any of its response for this long is disconnected.
_TAKE_SECONDS: Final = 30.0
_BACKLOG: Final = 1024
_PART_BYTES: Final = 64 * 1024

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Page = Callable[[], Response]

_NOT_FOUND: Final = Response(body=b"not found\n", status=404)
_ONLY_GET: Final = Response(body=b"only GET\n", status=405)


def application(pages: Mapping[str, Page]) -> Any:
    """Return an ASGI application that serves fixed pages, one request per connection."""

    async def serve(scope: Any, _receive: Any, send: Any) -> None:
        page = pages.get(scope["path"])
        response = _NOT_FOUND if page is None else page() if scope["method"] == "GET" else _ONLY_GET
        fields = {"content-type": response.content_type, "content-length": len(response.body), "connection": "close"}
        headers = [(name.encode(), f"{value}".encode()) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    return serve


class HttpServer:
    """A server for an ASGI application. An async context manager that sets `address` on entry.

    On exit, it stops accepting connections, sets `closing` so that streams can end, and gives open requests
    `drain_seconds` to complete.
    """

    protocol = "http"
    internal_address = ""

    def __init__(
        self,
        app: Any,
        listen: str,
        *,
        closing: asyncio.Event | None = None,
        tls: Tls | None = None,
        connections_max: int = 64,
        drain_seconds: float = 1.0,
    ) -> None:
        self._listen = listen
        self._closing = closing or asyncio.Event()
        self._drain_seconds = drain_seconds
        config = uvicorn.Config(
            _in_parts(app),
            http=_Protocol,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            limit_concurrency=connections_max,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=_HEAD_BYTES_MAX,
        )
        config.load()
        if tls is not None:
            config.ssl = http_context(tls)
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None
        self.address = ""

    async def __aenter__(self) -> Self:
        host, port = split_address(self._listen)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            bound = socket.create_server(found[0][4][:2], family=found[0][0], backlog=_BACKLOG, reuse_port=False)
        except OSError as error:
            raise StartError(f"cannot listen on {self._listen}: {error.strerror or error}") from None
        _notice_silence(bound)
        self.address = join_address(host, bound.getsockname()[1])
        self._serving = asyncio.get_running_loop().create_task(self._server.serve([bound]), name="http.server")
        while not self._server.started:
            if self._serving.done():
                await self._serving
            await asyncio.sleep(0.005)
        _log.info("http.listening", address=self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        if self._serving is None:
            return
        self._server.stop()
        await asyncio.wait({self._serving}, timeout=self._drain_seconds)
        self._server.force_exit = True
        for task in list(self._server.server_state.tasks):
            task.cancel()
        await asyncio.wait({self._serving}, timeout=self._drain_seconds)
        await tasks.end([self._serving])


def _notice_silence(listening: socket.socket) -> None:
    """Let the kernel close connections to peers that have vanished. Accepted sockets inherit these options."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _SILENT_SECONDS // 2),
        ("TCP_KEEPINTVL", _SILENT_SECONDS // 8),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", _SILENT_SECONDS * 1000),  # For sent data; Linux only.
    ):
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _in_parts(app: Any) -> Any:
    """Wrap `app` so that it sends bodies in small parts.

    A TLS transport does not count bytes that it has passed to the socket. After one large write, its buffer would look
    empty, and the server could not distinguish a stalled client from a slow one.
    """

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        async def send_parts(message: Any) -> None:
            body = message.get("body", b"")
            last = max(len(body) - 1, 0) // _PART_BYTES * _PART_BYTES
            for start in range(0, last, _PART_BYTES):
                await send({**message, "body": body[start : start + _PART_BYTES], "more_body": True})
            await send({**message, "body": body[last:]} if last else message)

        await app(scope, receive, send_parts)

    return serve


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signal handling to the process and sleeps until `stop`.

    uvicorn's own loop wakes ten times a second.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)  # Sets the default headers.
        await self._stopped.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """An HTTP protocol that closes connections whose request or response takes too long.

    h11 itself only limits sizes.
    """

    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1)  # Pause at any unsent byte. With 0, TLS pauses an empty buffer too.
        self._late = self.loop.call_later(_HEAD_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle: Any = self.cycle  # None before the first request
        is_answering = cycle is not None and not cycle.response_complete
        if is_answering and self._late is not None:
            self._late.cancel()
            self._late = None
        elif not is_answering and self._late is None:
            self._late = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._late, self._stuck):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _check_later(self) -> None:
        left = self._unread_bytes()
        self._stuck = self.loop.call_later(_TAKE_SECONDS, self._check, left)

    def _check(self, left: int) -> None:
        """Abort the connection if the client has read nothing since the last check.

        Closing the connection would wait for the client.
        """
        if self._unread_bytes() >= left:
            self.transport.abort()
        else:
            self._check_later()

    def _unread_bytes(self) -> int:
        """Return how many bytes the client has not received yet, here and in the kernel.

        The kernel buffers megabytes before it accepts more.
        """
        queued = bytes(4)
        with contextlib.suppress(OSError, ValueError):  # The socket was closed, or the system does not say.
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return int.from_bytes(queued, sys.byteorder) + int(self.transport.get_write_buffer_size())


# Returns if the dependency answers, otherwise raises.
Probe = Callable[[], Awaitable[object]]

_INTERVAL_SECONDS: Final = 5.0
# While a dependency does not answer.
_FAILING_INTERVAL_SECONDS: Final = 2.0
_TIMEOUT_SECONDS: Final = 2.0


class HealthMonitor:
    """Probes dependencies and sets the health of all services on an RPC server.

    It probes every 5 s, or every 2 s while a dependency is not answering.

    Services are NOT_SERVING while a required dependency is not answering. The health of optional dependencies is only
    reported. An async context manager, to be entered inside the server's context.
    """

    def __init__(self) -> None:
        self._probes: dict[str, tuple[Probe, bool]] = {}
        self._failures: dict[str, str] = {}
        self._serving = False
        self._server: RpcServer | None = None
        self._task: asyncio.Task[None] | None = None

    def add(self, name: str, probe: Probe, *, optional: bool = False) -> None:
        """Watch a dependency, starting with the next check."""
        self._probes[name] = (probe, optional)

    def follow(self, server: RpcServer) -> None:
        self._server = server

    async def __aenter__(self) -> Self:
        await self.check()
        self._task = asyncio.get_running_loop().create_task(self._repeat(), name="health.monitor")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await tasks.end([self._task])
        self._serving = False

    async def check(self) -> None:
        names = list(self._probes)
        outcomes = await asyncio.gather(*(self._probe(name) for name in names))
        for name, (failure, detail) in zip(names, outcomes, strict=True):
            if failure is None and self._failures.pop(name, None) is not None:
                _log.info("health.recovered", dependency=name)
            elif failure is not None and self._failures.get(name) != failure:
                self._failures[name] = failure
                _log.warning("health.lost", dependency=name, error=failure, detail=detail)
        self._serving = all(self._probes[name][1] for name in self._failures)
        if self._server is not None:
            self._server.set_health(serving=self._serving)

    def page(self) -> Response:
        checks = {name: self._failures.get(name, "ok") for name in self._probes}
        return Response(
            body=msgspec.json.encode({"serving": self._serving, "checks": checks}) + b"\n",
            content_type="application/json",
            status=200 if self._serving else 503,
        )

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(_FAILING_INTERVAL_SECONDS if self._failures else _INTERVAL_SECONDS)
            await self.check()

    async def _probe(self, name: str) -> tuple[str | None, str]:
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                await self._probes[name][0]()
        except TimeoutError:
            return f"no answer within {_TIMEOUT_SECONDS:g} s", ""
        except Exception as error:  # noqa: BLE001  # a probe fails in whatever way its driver does
            return type(error).__name__, "; ".join(getattr(error, "__notes__", ()))
        return None, ""
