"""HTTP/1.1 over asyncio and h11: enough of a server to answer well, and to misbehave on purpose.

A general framework would protect us from sending half a body or resetting a connection; here those are features.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import cast

import h11

BODY_BYTES_MAX = 16 * 1024 * 1024
_PHRASES = {int(status): status.phrase for status in HTTPStatus}
_SERVER = [("server", "pawl-scripted")]


class ClientGoneError(Exception):
    """The client closed the connection before the answer was complete."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, read whole."""

    method: str
    path: str
    body: bytes


Handler = Callable[[Request, "Connection"], Awaitable[None]]


class Connection(asyncio.Protocol):
    """One client connection: reads requests one after the other and hands each to the handler, which answers on it."""

    def __init__(self, handler: Handler, open_connections: set[Connection]) -> None:
        self._handler = handler
        self._open_connections = open_connections
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=64 * 1024)
        self._gone = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._readable = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._open_connections.add(self)
        self._task = asyncio.create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self._h11.receive_data(data)
        self._readable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        self._writable.set()
        self._readable.set()
        self._open_connections.discard(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # What a handler uses.

    async def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """Sends a whole response."""
        await self.start(status, {**headers, "content-length": str(len(body))})
        await self.write(body)
        await self.finish()

    async def start(self, status: int, headers: dict[str, str]) -> None:
        """Sends the head of a response; without a content length the body goes out in HTTP chunks."""
        reason = _PHRASES.get(status, "Unknown")
        fields = [*_SERVER, *headers.items()]
        self._put(self._h11.send(h11.Response(status_code=status, headers=fields, reason=reason.encode())))
        await self.drain()

    async def write(self, *pieces: bytes) -> None:
        """Sends pieces of the body, each as an HTTP chunk of its own, in one write to the socket."""
        self._put(b"".join(self._h11.send(h11.Data(data=piece)) or b"" for piece in pieces))
        await self.drain()

    async def finish(self) -> None:
        """Ends the response."""
        self._put(self._h11.send(h11.EndOfMessage()))
        await self.drain()

    async def drain(self) -> None:
        """Waits until the client keeps up. Raises ClientGoneError if it has left."""
        await self._writable.wait()
        if self._gone.is_set():
            raise ClientGoneError

    async def pause(self, seconds: float | None) -> None:
        """Waits for a time, or for ever with None. Raises ClientGoneError as soon as the client leaves."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), seconds)
        if self._gone.is_set():
            raise ClientGoneError

    def reset(self) -> None:
        """Aborts the connection, so that the client sees a reset instead of an end."""
        connected = self._transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def close(self) -> None:
        """Closes the connection, whatever was promised in the head of the response."""
        self._transport.close()

    async def stop(self) -> None:
        """Ends the work on this connection and closes it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._transport.abort()

    # The loop of one connection.

    async def _serve(self) -> None:
        try:
            while (request := await self._next_request()) is not None:
                await self._handler(request, self)
                if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
                    break
                self._h11.start_next_cycle()
        except ClientGoneError:
            pass
        except h11.RemoteProtocolError as error:
            await self._refuse(error.error_status_hint)
        finally:
            self._transport.close()

    async def _refuse(self, status: int) -> None:
        with contextlib.suppress(ClientGoneError, h11.LocalProtocolError):
            await self.send(status, {"connection": "close"}, b"")

    async def _next_request(self) -> Request | None:
        head: h11.Request | None = None
        body: list[bytes] = []
        size = 0
        while True:
            match self._h11.next_event():
                case h11.NEED_DATA:
                    await self._more()
                case h11.Request() as event:
                    head = event
                case h11.Data(data=data):
                    size += len(data)
                    if size > BODY_BYTES_MAX:
                        raise h11.RemoteProtocolError("body too large", error_status_hint=413)
                    body.append(bytes(data))
                case h11.EndOfMessage() if head is not None:
                    target = head.target.decode("latin-1").partition("?")[0]
                    return Request(method=head.method.decode(), path=target, body=b"".join(body))
                case _:
                    return None

    async def _more(self) -> None:
        if self._h11.they_are_waiting_for_100_continue:
            self._put(self._h11.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")))
        self._readable.clear()
        if not self._gone.is_set():
            await self._readable.wait()
        if self._gone.is_set():
            raise ClientGoneError

    def _put(self, data: bytes | None) -> None:
        if data and not self._transport.is_closing():
            self._transport.write(data)
