from __future__ import annotations

import asyncio

import pytest

from pawl.chassis.http_server import HttpServer, Response
from pawl.chassis.start import StartError


def fail() -> Response:
    raise RuntimeError("hunter2")


PAGES = {"/metrics": lambda: Response(body=b"up 1\n"), "/fail": fail}


async def ask(address: str, request: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_page_is_served_and_anything_else_has_its_status() -> None:
    async with HttpServer("127.0.0.1:0", PAGES) as server:
        answer = await ask(server.address, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert (b"Content-Length: 5" in head, body) == (True, b"up 1\n")
        for request, status in (
            (b"GET /nothing HTTP/1.1\r\n\r\n", b"404"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
            (b"nonsense\r\n\r\n", b"400"),
            (b"GET /metrics SPDY/3\r\n\r\n", b"400"),
            (b"GET /\xff HTTP/1.1\r\n\r\n", b"404"),
            (b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 5000, b"400"),
            (b"GET /fail HTTP/1.1\r\n\r\n", b"500"),
        ):
            answer = await ask(server.address, request)
            assert answer.startswith(b"HTTP/1.1 " + status), request
            assert b"hunter2" not in answer


async def test_a_stop_does_not_wait_for_a_silent_client() -> None:
    async with HttpServer("127.0.0.1:0", PAGES) as server:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_a_port_in_use_is_one_clear_sentence() -> None:
    async with HttpServer("127.0.0.1:0", PAGES) as server:
        with pytest.raises(StartError, match="cannot listen on 127"):
            await HttpServer(server.address, PAGES).__aenter__()
