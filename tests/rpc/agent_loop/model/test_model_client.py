"""The model client against a misbehaving server (LOOP-2, LOOP-6, LOOP-7)."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
from contextlib import aclosing
from email.utils import formatdate
from pathlib import Path

import pytest
import trustme

from pawl.agent_loop.loop.rules import retry
from pawl.agent_loop.loop.rules.run import FailureClass
from pawl.agent_loop.model import client
from pawl.agent_loop.model.client import OpenAiModel
from pawl.agent_loop.model.request import ModelRequest
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
    async with model_http(answer) as server, OpenAiModel(base_url=server.url, api_key="", format_with_tools=False) as m:
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
    bodies = [
        '{"error":{"message":"no room, sk-secret"}}',
        '{"error":"no room, sk-secret"}',
        '{"message":"no room, sk-secret"}',
        '{"detail":[{"msg":"no room, sk-secret"}]}',
        '[{"error":{"message":"no room, sk-secret"}}]',
        "no room, sk-secret",
        "<html><body>no room, <b>sk-secret</b></body></html>",
    ]
    for body in bodies:
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
        assert [await collect(model) for _ in range(3)] == [ANSWER] * 3
        assert server.connections == 1
        # Also ends in one step when the connection is lost.
        assert await asyncio.gather(*(collect(model) for _ in range(20))) == [ANSWER] * 20
