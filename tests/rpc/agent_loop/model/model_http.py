"""A model server that controls each byte that it sends and records what the client does."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pawl.agent_loop.model.client import OpenAiModel
from pawl.agent_loop.model.request import Finished, ModelError, ModelRequest, Piece, Problem, Sent, TextPiece
from tests.rpc.refusals import raises


@dataclass(slots=True)
class Exchange:
    head: str
    data: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def body(self) -> Any:
        return json.loads(self.data)

    async def send(self, *parts: str | bytes) -> None:
        for part in parts:
            self.writer.write(part.encode() if isinstance(part, str) else part)
            await self.writer.drain()

    async def start_stream(self, content_type: str = "text/event-stream") -> None:
        await self.send(f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def chunk(self, data: str | bytes) -> None:
        data = data.encode() if isinstance(data, str) else data
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def events(self, *chunks: Any) -> None:
        for chunk in chunks:
            await self.chunk("data: " + (chunk if isinstance(chunk, str) else json.dumps(chunk)) + "\n\n")

    async def end(self) -> None:
        await self.send("0\r\n\r\n")

    async def respond(self, status: int, body: str = "", headers: str = "") -> None:
        head = f"HTTP/1.1 {status} Whatever\r\nContent-Type: application/json\r\n{headers}"
        await self.send(f"{head}Content-Length: {len(body.encode())}\r\n\r\n{body}")

    async def close(self) -> None:
        self.writer.close()

    async def client_left(self) -> None:
        while await self.reader.read(4096):
            pass


HI = {"choices": [{"index": 0, "delta": {"content": "Hi"}}]}
STOP = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
DONE = "[DONE]"
ANSWER = [TextPiece(text="Hi"), Finished(reason="stop")]

Script = Callable[[Exchange], Awaitable[None]]


def streams(*chunks: Any, then: Script = Exchange.end) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.events(*chunks)
        await then(exchange)

    return script


def sends(*parts: str | bytes, then: Script | None = None) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.send(*parts)
        if then is not None:
            await then(exchange)

    return script


def responds(status: int, body: str = "", headers: str = "") -> Script:
    return lambda exchange: exchange.respond(status, body, headers)


# The shortest complete answer
answer = streams(HI, STOP, DONE)


@dataclass(slots=True)
class ModelHttp:
    """A model server that counts its requests, connections and closed connections."""

    url: str
    exchanges: list[Exchange] = field(default_factory=list)
    connections: int = 0
    left: int = 0


@asynccontextmanager
async def model_http(script: Script, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[ModelHttp]:
    """Run `script` for each request. The connection stays open when the script returns."""
    server = ModelHttp(url="")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length")
                )
                exchange = Exchange(head, await reader.readexactly(length), reader, writer)
                server.exchanges.append(exchange)
                await script(exchange)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()
            server.left += 1

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    host, port = listener.sockets[0].getsockname()
    server.url = f"http{'s' if tls else ''}://{host}:{port}/v1"
    async with listener:
        yield server


NOW = 1_800_000_000.0


@asynccontextmanager
async def serving(script: Script, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[ModelHttp, OpenAiModel]]:
    async with (
        model_http(script, tls=tls) as server,
        OpenAiModel(base_url=server.url, api_key="sk-secret", now=lambda: NOW) as model,
    ):
        yield server, model


async def collect(model: OpenAiModel, **fields: Any) -> list[Piece]:
    request = ModelRequest(**{"model": "m", "messages": ({"role": "user", "content": "Hello"},), **fields})
    async with aclosing(model.stream(request)) as pieces:
        return [piece async for piece in pieces if not isinstance(piece, Sent)]


async def problem(model: OpenAiModel, **fields: Any) -> Problem:
    return (await raises(ModelError, collect(model, **fields))).problem


async def answered(script: Script, **fields: Any) -> list[Piece]:
    async with serving(script) as (_, model):
        return await collect(model, **fields)


async def failed(script: Script, **fields: Any) -> Problem:
    async with serving(script) as (_, model):
        return await problem(model, **fields)
