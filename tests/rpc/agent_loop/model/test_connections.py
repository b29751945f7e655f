"""HTTP connections of the model client: reuse, loss and limits."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from pawl.agent_loop.model import connection
from pawl.agent_loop.model.client import OpenAiModel
from pawl.agent_loop.model.connection import HEAD_BYTES_MAX, IDLE_MAX, Connection, Origin, Pool
from tests.poll import until
from tests.rpc.agent_loop.model.model_http import (
    ANSWER,
    DONE,
    HI,
    STOP,
    Exchange,
    ModelHttp,
    answer,
    answered,
    collect,
    failed,
    model_http,
    problem,
    sends,
    serving,
    streams,
)

EVENTS = (
    b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
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


async def test_broken_connection_is_not_reused() -> None:
    for response in (
        with_length(EVENTS, b"Connection: close\r\n"),
        b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS,
        with_length(EVENTS) * 2,  # No client requested a second response
        with_length(EVENTS) + b"garbage",
    ):
        async with serving(sends(response)) as (server, model):
            for number in (1, 2, 3):
                assert await collect(model) == ANSWER, response
                assert server.connections == number, response
            await until(lambda server=server: server.left == 3)  # type: ignore[misc]


async def test_body_may_end_when_the_connection_closes() -> None:
    assert await answered(sends(OK + b"\r\n" + EVENTS[:60], EVENTS[60:], then=Exchange.close)) == ANSWER


@pytest.mark.parametrize("half", [False, True])
async def test_connection_closed_by_the_server_is_not_reused(half: bool) -> None:
    closed = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await answer(exchange)
        if half:
            exchange.writer.write_eof()
        else:
            exchange.writer.close()
            await exchange.writer.wait_closed()
        closed.set()

    async with serving(script) as (server, model):
        for number in range(1, 4):
            assert await collect(model) == ANSWER
            await closed.wait()
            closed.clear()
            assert (server.connections, len(server.exchanges)) == (number, number)


async def test_request_that_the_server_may_have_read_is_not_resent() -> None:
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
        (b"HTTP/1.1 100 Continue\r\n\r\n" * (HEAD_BYTES_MAX // 25 + 2), "NETWORK"),
        (CHUNKED + b"0\r\n" + b"X-Trailer: x\r\n" * (HEAD_BYTES_MAX // 14 + 1), "STREAM_TRUNCATED"),
        (CHUNKED + b"1;" + b"x" * HEAD_BYTES_MAX, "STREAM_TRUNCATED"),
    ):
        assert (await failed(sends(response, then=Exchange.client_left))).reason == expected, response[:60]


async def test_unreadable_response_is_a_server_error() -> None:
    for response, expected in (
        (b"SSH-2.0-OpenSSH_9.9\r\n", "NETWORK"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "NETWORK"),
        (OK + b"Content-Length: many\r\n\r\n", "NETWORK"),
        (OK + b"Content-Length: 9999\r\n\r\n" + EVENTS[:60], "STREAM_TRUNCATED"),
        (CHUNKED + b"zz\r\n", "STREAM_TRUNCATED"),
        (CHUNKED + b"%x\r\n" % len(EVENTS) + EVENTS[:60], "STREAM_TRUNCATED"),
        (with_length(b"no gzip at all", GZIP), "STREAM_GARBLED"),
        (with_length(gzip.compress(EVENTS[:60]), GZIP), "STREAM_TRUNCATED"),
    ):
        assert (await failed(sends(response, then=Exchange.close))).reason == expected, response


async def test_concurrent_calls_use_separate_connections_and_few_are_kept() -> None:
    async with serving(answer) as (server, model):
        assert await asyncio.gather(*(collect(model) for _ in range(200))) == [ANSWER] * 200
        await until(lambda: server.connections - server.left <= IDLE_MAX)
        before = server.connections
        assert await asyncio.gather(*(collect(model) for _ in range(IDLE_MAX // 2))) == [ANSWER] * (IDLE_MAX // 2)
        assert server.connections == before <= 200
    await until(lambda: server.left == server.connections)


async def test_calls_above_the_connection_limit_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECTIONS_MAX", 2)
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


async def test_closing_the_client_ends_running_calls() -> None:
    async with model_http(streams(HI, then=Exchange.client_left)) as server:
        async with OpenAiModel(base_url=server.url, api_key="") as model:
            call = asyncio.create_task(problem(model))
            await until(lambda: len(server.exchanges) == 1)
        assert (await call).reason in {"NETWORK", "STREAM_TRUNCATED"}


async def raw(connections: Pool) -> Connection:
    """Send a request and return its connection without reading the response body."""
    connection = await connections.take()
    await connection.send(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
    return connection


def origin(server: ModelHttp) -> Origin:
    return Origin(host="127.0.0.1", port=int(server.url.split(":")[2].split("/")[0]), tls=None)


async def test_idle_connection_is_closed() -> None:
    async with model_http(sends(with_length(b""))) as server:
        connections = Pool(origin(server), idle_seconds=0.01)
        connections.give(await raw(connections))
        await until(lambda: server.left == 1)
        await connections.close()


async def test_slow_reader_applies_backpressure_to_the_server() -> None:
    whole = 32 * 1024 * 1024
    sent = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.send(OK + b"Content-Length: %d\r\n\r\n" % whole, *[b"x" * 65536] * (whole // 65536))
        sent.set()

    async with model_http(script) as server:
        connections = Pool(origin(server))
        connection = await raw(connections)
        await until(lambda: connection._paused)
        assert not sent.is_set()
        read = 0
        while (data := await connection.read()) is not None:
            read += len(data)
        assert read == whole
        connections.give(connection)
        await connections.close()
