"""A small HTTP/1.1 server over asyncio and h11 that can also misbehave on purpose.

A general framework would prevent truncated bodies and connection resets, which are features here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import h11

BODY_BYTES_MAX = 16 * 1024 * 1024
_READ_BYTES = 64 * 1024
_PHRASES = {int(status): status.phrase for status in HTTPStatus}
_SERVER = [("server", "pawl-scripted")]


class ClientGoneError(Exception):
    """Raised when the client closed the connection before the response was complete."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    method: str
    path: str
    body: bytes


Handler = Callable[[Request, "Connection"], Awaitable[None]]


class Connection:
    """A client connection. It reads requests in sequence and passes each one to a handler."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=_READ_BYTES)

    async def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        await self.start(status, {**headers, "content-length": str(len(body))})
        await self.write(body)
        await self.finish()

    async def start(self, status: int, headers: dict[str, str]) -> None:
        """Send the response head. Without a content length, the body is sent chunked."""
        reason, fields = _PHRASES.get(status, "Unknown"), [*_SERVER, *headers.items()]
        await self._put(self._h11.send(h11.Response(status_code=status, headers=fields, reason=reason.encode())))

    async def write(self, *pieces: bytes) -> None:
        """Send pieces of the body in a single write to the socket, each as a separate HTTP chunk."""
        await self._put(b"".join(self._h11.send(h11.Data(data=piece)) or b"" for piece in pieces))

    async def finish(self) -> None:
        await self._put(self._h11.send(h11.EndOfMessage()))

    async def pause(self, seconds: float | None) -> None:
        """Wait, or wait forever if `seconds` is None. Raise ClientGoneError as soon as the client disconnects."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while await self._read():
                    pass
            raise ClientGoneError

    def reset(self) -> None:
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        """Close the connection, even in the middle of a response."""
        self._writer.close()

    async def serve(self, handler: Handler) -> None:
        try:
            while (request := await self._next_request()) is not None:
                await handler(request, self)
                if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
                    break
                self._h11.start_next_cycle()
        except ClientGoneError:
            pass
        except h11.RemoteProtocolError as error:
            with contextlib.suppress(ClientGoneError, h11.LocalProtocolError):
                await self.send(error.error_status_hint, {"connection": "close"}, b"")
        finally:
            self._writer.close()

    async def _next_request(self) -> Request | None:
        head: h11.Request | None = None
        body = bytearray()
        while True:
            match self._h11.next_event():
                case h11.NEED_DATA:
                    await self._read()
                case h11.Request() as event:
                    head = event
                case h11.Data(data=data):
                    body += data
                    if len(body) > BODY_BYTES_MAX:
                        raise h11.RemoteProtocolError("body too large", error_status_hint=413)
                case h11.EndOfMessage() if head is not None:
                    target = head.target.decode("latin-1").partition("?")[0]
                    return Request(method=head.method.decode(), path=target, body=bytes(body))
                case _:
                    return None

    async def _read(self) -> bytes:
        try:
            data = await self._reader.read(_READ_BYTES)
        except ConnectionError:
            raise ClientGoneError from None
        self._h11.receive_data(data)
        return data

    async def _put(self, data: bytes | None) -> None:
        self._writer.write(data or b"")
        try:
            await self._writer.drain()
        except ConnectionError:
            raise ClientGoneError from None
