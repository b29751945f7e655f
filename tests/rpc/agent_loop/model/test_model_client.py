"""The model client against a misbehaving server, and its HTTP connections (LOOP-2, LOOP-6, LOOP-7)."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
from contextlib import aclosing
from email.utils import formatdate
from functools import partial
from pathlib import Path

import pytest
import trustme

from pawl.agent_loop.loop.rules import retry
from pawl.agent_loop.loop.rules.run import FailureClass
from pawl.agent_loop.model import client
from pawl.agent_loop.model.client import OpenAiModel, body_of
from pawl.agent_loop.model.request import ModelRequest
from tests.poll import until
from tests.rpc.agent_loop.model.model_http import (
    ANSWER,
    DONE,
    HI,
    NOW,
    STOP,
    Exchange,
    answer,
    answered,
    collect,
    failed,
    model_http,
    problem,
    responds,
    sends,
    serving,
    streams,
)

PROVIDER, AUTH = FailureClass.PROVIDER, FailureClass.AUTH


def fields(exchange: Exchange) -> dict[str, str]:
    lines = exchange.head.strip().split("\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def test_request_contains_only_the_given_options() -> None:
    tools = ({"type": "function", "function": {"name": "f"}},)
    asked = {"tools": tools, "tool_choice": "required", "temperature": 0.5, "reasoning_effort": "low"}
    form = {"type": "json_object"}
    async with serving(answer) as (server, model):
        await collect(model, **asked, output_tokens_max=7, response_format=form)
        await collect(model)
    full, plain = (exchange.body for exchange in server.exchanges)
    assert full == asked | {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [*tools],
        "max_completion_tokens": 7,
        "response_format": form,
    }
    assert set(plain) == {"model", "messages", "stream", "stream_options"}


async def test_response_format_is_omitted_with_tools_if_unsupported() -> None:
    tools = ({"type": "function", "function": {"name": "f"}},)
    body = partial(body_of, format_with_tools=False)
    async with model_http(answer) as server, OpenAiModel(base_url=server.url, api_key="", body=body) as m:
        for offered in (tools, ()):
            await collect(m, tools=offered, response_format={"type": "json_object"})
    assert ["response_format" in exchange.body for exchange in server.exchanges] == [False, True]


async def test_request_matches_that_of_the_openai_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request also contains the settings that the openai client reads from the environment."""
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-1")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Team: blue")
    async with serving(answer) as (server, model):
        await collect(model)
    (asked,) = server.exchanges
    assert asked.head.split("\r\n")[0] == "POST /v1/chat/completions HTTP/1.1"
    expected = {
        "authorization": "Bearer sk-secret",
        "openai-organization": "org-1",
        "openai-project": "proj-1",
        "x-team": "blue",
        "accept-encoding": "identity",
        "content-type": "application/json",
    }
    assert fields(asked).items() >= expected.items()


async def test_the_status_code_decides_the_error_and_the_client_does_not_retry() -> None:
    """C13: an error text about status 429 or timeouts has no influence."""
    body = '{"error":{"message":"429 rate limit timeout sk-secret","code":"429"}}'
    for status, failure_class, retryable in (
        *((400, PROVIDER, False), (401, AUTH, False), (403, AUTH, False), (404, PROVIDER, False)),
        *((408, PROVIDER, True), (409, PROVIDER, True), (422, PROVIDER, False), (429, FailureClass.RATE, True)),
        *((500, PROVIDER, True), (503, PROVIDER, True), (529, PROVIDER, True)),
    ):
        async with serving(responds(status, body)) as (server, model):
            error = await problem(model)
        assert (error.reason, error.failure_class, error.retryable) == (f"HTTP_{status}", failure_class, retryable)
        assert "sk-secret" not in error.message
        assert len(server.exchanges) == 1


async def test_only_content_refusals_are_classified_as_refused() -> None:
    for status, code, refuses in (
        *((400, "invalid_image", True), (404, "", True), (413, "", True), (422, "", True)),
        *((400, "context_length_exceeded", False), (400, "invalid_api_key", False)),
        *((402, "", False), (403, "", False), (429, "", False), (500, "", False)),
    ):
        error = await failed(responds(status, json.dumps({"error": {"message": "no", "code": code}})))
        assert error.refuses_content is refuses, (status, code)
        assert (retry.failure_of(error).reason == "PROVIDER_REFUSED") is refuses, (status, code)


async def test_error_text_is_kept_in_any_shape_and_encoding() -> None:
    for body in [
        '{"error":{"message":"no room, sk-secret"}}',
        '{"error":"no room, sk-secret"}',
        '{"message":"no room, sk-secret"}',
        '{"detail":[{"msg":"no room, sk-secret"}]}',
        '[{"error":{"message":"no room, sk-secret"}}]',
        "no room, sk-secret",
        "<html><body>no room, <b>sk-secret</b></body></html>",
    ]:
        assert (await failed(responds(400, body))).message.endswith("(HTTP 400): no room, ***."), body
    for encoding, sent, said in (
        ("gzip", gzip.compress(b"no room"), ": no room."),
        ("gzip", b"no room", "."),
        ("identity\r\nContent-Type: text/plain; charset=base64", b"no room", "."),
        ("identity", b"\xff", "."),
        ("identity", b"", "."),
    ):
        head = f"HTTP/1.1 502 Bad\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(sent)}\r\n\r\n"
        async with serving(sends(head, sent)) as (server, model):
            errors = [await problem(model) for _ in range(2)]
        assert [error.message.partition("(HTTP 502)")[2] for error in errors] == [said] * 2, encoding
        assert server.connections == 1, "the connection of a refusal is used again"


async def test_error_code_for_credentials_overrides_the_status() -> None:
    error = await failed(responds(400, '{"error":{"message":"sk-... is wrong","code":"invalid_api_key"}}'))
    assert (error.reason, error.failure_class, error.retryable) == ("HTTP_401", AUTH, False)
    assert "wrong" not in error.message


async def test_retry_after_is_parsed_in_both_formats() -> None:
    for status, header, seconds in (
        (429, "Retry-After: 7\r\n", 7.0),
        (503, "Retry-After: 7\r\nretry-after-ms: 1500\r\n", 1.5),
        (429, "Retry-After: 7\r\nretry-after-ms: soon\r\n", 7.0),
        (429, "retry-after-ms: inf\r\n", None),
        (429, "Retry-After: 0.5\r\n", 0.5),
        (503, f"Retry-After: {formatdate(NOW + 30, usegmt=True)}\r\n", 30.0),
        (429, f"Retry-After: {formatdate(NOW - 30, usegmt=True)}\r\n", 0.0),
        (429, "Retry-After: -3\r\n", 0.0),
        (429, "Retry-After: nan\r\n", None),
        (429, "Retry-After: Wed, 99 Foo 2030 99:99:99 GMT\r\n", None),
        (503, "", None),
    ):
        assert (await failed(responds(status, "{}", header))).retry_after_seconds == seconds, header


async def test_lost_connection_is_an_error_unless_the_answer_was_complete() -> None:
    async def reset(exchange: Exchange) -> None:
        exchange.writer.transport.abort()

    assert (await failed(Exchange.close)).reason == "NETWORK"
    error = await failed(streams(HI, then=Exchange.close))
    assert (error.reason, error.retryable) == ("STREAM_TRUNCATED", True)
    error = await failed(streams(HI, then=reset))
    assert (error.reason in {"NETWORK", "STREAM_TRUNCATED"}, error.retryable) == (True, True)
    assert await answered(streams(HI, STOP, then=Exchange.close)) == ANSWER


async def test_incomplete_refusal_is_still_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_ERROR_BYTES_MAX", 100_000)
    head = "HTTP/1.1 503 No\r\nRetry-After: 7\r\nContent-Length: 99999999\r\n\r\n"
    for then, size in ((Exchange.close, 10), (Exchange.client_left, 100_010)):
        error = await failed(sends(head, b"x" * size, then=then))
        assert (error.reason, error.retry_after_seconds) == ("HTTP_503", 7.0)


async def test_silent_server_times_out() -> None:
    for script, limit, reason in (
        (Exchange.client_left, {"headers_timeout_seconds": 0.05}, "HEADERS_TIMEOUT"),
        (streams(HI, then=Exchange.client_left), {"idle_timeout_seconds": 0.05}, "IDLE_TIMEOUT"),
    ):
        error = await failed(script, **limit)
        assert (error.reason, error.failure_class, error.retryable) == (reason, PROVIDER, True)


async def test_comments_keep_a_stream_alive_beyond_its_idle_limit() -> None:
    """D11: comments count as activity."""

    async def comments(exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + 2.5
        while loop.time() < end:
            await exchange.chunk(": keep-alive\n\n")
            await asyncio.sleep(0.05)
        await exchange.events(HI, STOP, DONE)
        await exchange.end()

    assert await answered(streams(then=comments), idle_timeout_seconds=2) == ANSWER


async def test_keep_alive_comments_do_not_extend_the_round_timeout() -> None:
    """D11: the round timeout still applies, and its error type differs from provider errors."""

    async def comments(exchange: Exchange) -> None:
        while True:
            await exchange.chunk(": keep-alive\n\n")
            await asyncio.sleep(0.01)

    for script in (streams(then=comments), Exchange.client_left):
        error = await failed(script, deadline_seconds=0.1)
        assert (error.reason, error.failure_class, error.retryable) == ("ROUND_TIMEOUT", FailureClass.LIMIT, False)


async def test_leaving_a_stream_closes_the_connection() -> None:
    """C5: the server sees the client disconnect and can stop generating."""
    left = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await exchange.client_left()
        left.set()

    async with serving(streams(HI, then=wait)) as (_, model):
        async with aclosing(model.stream(ModelRequest(model="m", messages=()))) as pieces:
            await anext(pieces)
        await left.wait()


# Environment variables of the openai client work here too.


async def test_api_key_cannot_inject_headers() -> None:
    async with model_http(answer) as server, OpenAiModel(base_url=server.url, api_key="sk-1\r\nX-Evil: 1") as model:
        error = await problem(model)
        assert (error.reason, error.retryable, server.exchanges) == ("NETWORK", True, [])
        assert "sk-1" not in str(error)


async def test_unreachable_address_is_a_network_error() -> None:
    for url in ("/", "nonsense", "ftp://127.0.0.1/v1", "http://127.0.0.1:9/v1", "http://no.invalid/v1"):
        async with OpenAiModel(base_url=url, api_key="") as model:
            assert (await problem(model)).reason == "NETWORK", url


async def test_redirects_are_followed() -> None:
    async with model_http(answer) as new:
        moved = responds(307, headers=f"Location: {new.url}/chat/completions\r\n")
        async with serving(moved) as (_, model):
            assert [await collect(model) for _ in range(3)] == [ANSWER] * 3
    assert [exchange.body["model"] for exchange in new.exchanges] == ["m"] * 3
    assert (await failed(responds(304))).reason == "HTTP_304"


async def test_credentials_in_the_address_are_sent() -> None:
    async with (
        model_http(answer) as server,
        OpenAiModel(base_url=server.url.replace("://", "://ann:pw@"), api_key="") as model,
    ):
        assert await collect(model) == ANSWER
    assert fields(server.exchanges[0])["authorization"] == "Basic YW5uOnB3"


async def test_cookies_are_sent_back_to_the_server() -> None:
    """Some load balancers route by cookies."""

    async def script(exchange: Exchange) -> None:
        cookie = "" if "cookie" in fields(exchange) else "Set-Cookie: node=7; Path=/\r\n"
        body = json.dumps({"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]})
        await exchange.respond(200, body, cookie)

    async with serving(script) as (server, model):
        assert [await collect(model) for _ in range(3)] == [ANSWER] * 3
        assert [fields(exchange).get("cookie") for exchange in server.exchanges] == [None, "node=7", "node=7"]


async def test_proxy_is_used_except_for_excluded_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with model_http(answer) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        async with OpenAiModel(base_url="http://model.invalid/v1", api_key="sk-1") as model:
            assert [await collect(model) for _ in range(2)] == [ANSWER] * 2
        heads = [exchange.head for exchange in proxy.exchanges]
        assert [head.split()[1] for head in heads] == ["http://model.invalid/v1/chat/completions"] * 2
    for exceptions in ("127.0.0.1", "localhost, 127.0.0.1", "*"):
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", exceptions)
        assert await answered(answer) == ANSWER, exceptions


async def test_only_servers_with_a_trusted_certificate_get_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, context = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    async with serving(answer, tls=context) as (server, model):
        assert (await problem(model)).reason == "NETWORK"
        assert not server.exchanges
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    async with serving(answer, tls=context) as (server, model):
        assert ([await collect(model) for _ in range(3)], server.connections) == ([ANSWER] * 3, 1)
        # Also ends in one step when the connection is lost.
        assert await asyncio.gather(*(collect(model) for _ in range(20))) == [ANSWER] * 20


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
        assert (await collect(model), (await problem(model)).reason, len(server.exchanges)) == (ANSWER, "NETWORK", 2)


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
