"""HTTP connections of the model client: reuse, loss and limits."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from pawl.agent_loop.model import client
from tests.poll import until
from tests.rpc.agent_loop.model.model_http import (
    ANSWER,
    DONE,
    HI,
    STOP,
    Exchange,
    answer,
    collect,
    failed,
    problem,
    sends,
    serving,
    streams,
)

EVENTS = (
    b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
HEAD_BYTES_MAX = 128 * 1024
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
GZIP = b"Content-Encoding: gzip\r\n"


def with_length(body: bytes, headers: bytes = b"") -> bytes:
    return OK + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes) -> bytes:
    return CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


async def test_connection_is_reused_after_its_response_was_read_completely() -> None:
    for response in (
        with_length(EVENTS),
        chunked(EVENTS),
        with_length(EVENTS).replace(b"\r\n", b"\n"),
        b"HTTP/1.1 100 Continue\r\n\r\n" + with_length(EVENTS),
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n" + chunked(EVENTS),
        chunked(EVENTS)[:-2] + b"Trailer: of no interest\r\n\r\n",
        with_length(EVENTS, b"Content-Encoding: identity\r\n"),
        with_length(gzip.compress(EVENTS), GZIP),
        chunked(gzip.compress(EVENTS)).replace(b"\r\n", b"\r\n" + GZIP, 1),
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS,
    ):
        for parts in ([response], [bytes([byte]) for byte in response]):
            async with serving(sends(*parts)) as (server, model):
                assert [await collect(model) for _ in range(3)] == [ANSWER] * 3, response
                assert server.connections == 1, response


async def test_a_request_that_the_server_may_have_read_is_not_resent() -> None:
    """Model calls are not idempotent, and a server that closes without a response may have started to generate."""
    scripts = iter([answer, Exchange.close])

    async def script(exchange: Exchange) -> None:
        await next(scripts)(exchange)

    async with serving(script) as (server, model):
        assert await collect(model) == ANSWER
        assert (await problem(model)).reason == "NETWORK"
        assert len(server.exchanges) == 2


async def test_endless_response_head_is_rejected() -> None:
    for response, expected in (
        (OK + b"X-Long: " + b"x" * HEAD_BYTES_MAX, "NETWORK"),
        (OK + b"X-Many: x\r\n" * (HEAD_BYTES_MAX // 11 + 1), "NETWORK"),
        (CHUNKED + b"0\r\n" + b"X-Trailer: x\r\n" * (HEAD_BYTES_MAX // 14 + 1), "NETWORK"),
    ):
        assert (await failed(sends(response, then=Exchange.client_left))).reason == expected, response[:60]


async def test_unreadable_response_is_a_server_error() -> None:
    for response, expected in (
        (b"SSH-2.0-OpenSSH_9.9\r\n", "NETWORK"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "HTTP_101"),
        (OK + b"Content-Length: many\r\n\r\n", "NETWORK"),
        (OK + b"Content-Length: 9999\r\n\r\n" + EVENTS[:60], "STREAM_TRUNCATED"),
        (CHUNKED + b"zz\r\n", "NETWORK"),
        (CHUNKED + b"%x\r\n" % len(EVENTS) + EVENTS[:60], "STREAM_TRUNCATED"),
        (with_length(b"no gzip at all", GZIP), "STREAM_GARBLED"),
        (with_length(gzip.compress(EVENTS[:60]), GZIP), "STREAM_TRUNCATED"),
    ):
        assert (await failed(sends(response, then=Exchange.close))).reason == expected, response


async def test_calls_above_the_connection_limit_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECTIONS_MAX", 2)
    async with serving(answer) as (server, model):
        assert await asyncio.gather(*(collect(model) for _ in range(7))) == [ANSWER] * 7
        assert server.connections <= 2


async def test_cancelled_call_releases_its_connection() -> None:
    wait = Exchange.client_left
    refusing = sends("HTTP/1.1 500 No\r\nContent-Length: 99\r\n\r\nhalf", then=wait)
    for script in (wait, streams(HI, then=wait), streams(HI, STOP, DONE, then=wait), refusing):
        async with serving(script) as (server, model):
            calls = [asyncio.create_task(collect(model)) for _ in range(5)]
            await until(lambda server=server: len(server.exchanges) == 5)  # type: ignore[misc]
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await until(lambda server=server: server.left == 5)  # type: ignore[misc]
        assert asyncio.all_tasks() == {asyncio.current_task()}
