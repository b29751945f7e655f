"""The server: readers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from pawl.gateway.adapters import server
from pawl.gateway.adapters.server import HttpServer

pytestmark = pytest.mark.asyncio
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
PART = b"x" * 65536


def served(app: Any) -> HttpServer:
    return HttpServer(app, "127.0.0.1:0", closing=asyncio.Event(), tls=None, connections_max=10, drain_seconds=1.0)


def reader(address: str, request: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.connect((host, int(port)))
    found.sendall(request)
    return found


@pytest.mark.parametrize("request_", [REQUEST, REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")])
@pytest.mark.parametrize("parts", [1, 1000])
async def test_a_reader_that_takes_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, request_: bytes, parts: int
) -> None:
    monkeypatch.setattr(server, "_TAKE_SECONDS", 0.2)
    whole = PART * (16_000_000 // len(PART) // parts)
    ended = asyncio.Event()

    async def app(_: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(parts):
            await send({"type": "http.response.body", "body": whole, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        ended.set()

    async with served(app) as found:
        with contextlib.closing(reader(found.address, request_)):
            await ended.wait()
            while found._server.server_state.connections:  # what is open is seen nowhere else
                await asyncio.sleep(0.01)
