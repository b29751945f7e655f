"""A scripted web server for tests that records its requests."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Asked:
    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    # Repeat the last byte of the body forever
    is_endless: bool = False
    # Send no response
    waits: bool = False
    # Wait with the response until this is set
    held: asyncio.Event | None = None
    # Sent before the response
    interim: bytes = b""
    # Close the connection instead of responding
    breaks: bool = False


@dataclass
class WebServer:
    answer: Callable[[Asked], Reply]
    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    # The local address of each connection
    addresses: list[str] = field(default_factory=list)
    sent_bytes: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.addresses.append(writer.get_extra_info("sockname")[0])
        self._writers.add(writer)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        method, target, _ = first.split(" ")
        request = Asked(method, target, headers, body)
        self.asked.append(request)
        reply = self.answer(request)
        if reply.breaks:
            return
        if reply.waits:
            await reader.read()
            return
        if reply.held is not None:
            await reply.held.wait()
        length = {} if reply.is_endless else {"Content-Length": str(len(reply.body))}
        fields = {"Connection": "close", "Content-Type": "text/html; charset=utf-8"} | length | dict(reply.headers)
        writer.write(reply.interim)
        writer.write(f"HTTP/1.1 {reply.status} OK\r\n".encode())
        writer.write("".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode() + b"\r\n")
        writer.write(reply.body)
        await writer.drain()
        while reply.is_endless:
            writer.write(reply.body[-1:] * 65536)
            self.sent_bytes += 65536
            await writer.drain()

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def web_server(
    answer: Callable[[Asked], Reply],
    *,
    host: str | list[str] = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[WebServer]:
    server = WebServer(answer)
    listening = await asyncio.start_server(server.serve, host, port, ssl=tls)
    try:
        server.port = listening.sockets[0].getsockname()[1]
        yield server
    finally:
        listening.close()
        server.close()


def pages(replies: Mapping[str, Reply]) -> Callable[[Asked], Reply]:
    return lambda asked: replies.get(asked.target.partition("?")[0], Reply(status=404))


class Names:
    def __init__(self, addresses: Mapping[str, list[str] | list[list[str]]]) -> None:
        self._addresses = addresses
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self._addresses.get(host)
        if answers is None:
            raise OSError("no such name")
        times = self.asked.count(host) - 1
        rounds = [answers if isinstance(item, str) else item for item in answers]
        found = rounds[min(times, len(rounds) - 1)]
        return [item for item in found if isinstance(item, str)]
