"""A small HTTP server for machines that look after the process: GET only."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from pawl.chassis import logs, tasks
from pawl.chassis.settings import join_address, split_address
from pawl.chassis.start import StartError

_HEAD_BYTES_MAX: Final = 8192
_REQUEST_SECONDS_MAX: Final = 10.0
_CONNECTIONS_MAX: Final = 64

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The answer of a page."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: str = "200 OK"


Page = Callable[[], Response]

_NOT_FOUND = Response(body=b"not found\n", status="404 Not Found")
_ONLY_GET = Response(body=b"only GET\n", status="405 Method Not Allowed")
_BAD_REQUEST = Response(body=b"bad request\n", status="400 Bad Request")
_BUSY = Response(body=b"too many connections\n", status="503 Service Unavailable")


class HttpServer:
    """Serves fixed pages, one request a connection, each bounded in size and time.

    An async context manager; `address` is the bound `host:port` inside it. With a `context` it speaks HTTPS.
    """

    def __init__(self, listen: str, pages: Mapping[str, Page], *, context: ssl.SSLContext | None = None) -> None:
        self._host, self._port = split_address(listen)
        self._context = context
        self._pages = dict(pages)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(
                self._accept,
                self._host,
                self._port,
                limit=_HEAD_BYTES_MAX,
                ssl=self._context,
                ssl_handshake_timeout=_REQUEST_SECONDS_MAX if self._context else None,
            )
        except OSError as error:
            raise StartError(f"cannot listen on {self._host}:{self._port}: {error.strerror or error}") from None
        port: int = self._server.sockets[0].getsockname()[1]
        self.address = join_address(self._host, port)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is None:
            return
        self._server.close()
        await tasks.end(self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.start(self._connections, self._serve(reader, writer), name="http.serve")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_SECONDS_MAX):
                response = _BUSY if len(self._connections) > _CONNECTIONS_MAX else await self._answer(reader)
                writer.write(_render(response))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return  # The client went away or was too slow: nobody is left to tell.
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> Response:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _BAD_REQUEST
        method, _, rest = head.partition(b" ")
        target, _, version = rest.partition(b"\r\n")[0].rpartition(b" ")
        if not version.startswith(b"HTTP/1."):
            return _BAD_REQUEST
        page = self._pages.get(target.partition(b"?")[0].decode("latin-1"))
        if page is None:
            return _NOT_FOUND
        if method != b"GET":
            return _ONLY_GET
        try:
            return page()
        except Exception:  # noqa: BLE001  # whatever a page raises must not end the server
            _log.exception("http.page_failed")
            return Response(body=b"internal error\n", status="500 Internal Server Error")


def _render(response: Response) -> bytes:
    head = (
        f"HTTP/1.1 {response.status}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + response.body
