"""The model client against a server that does everything wrong (LOOP-2, LOOP-6, LOOP-7)."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from email.utils import formatdate
from typing import Any

import pytest

from pawl.agent_loop.adapters.model.client import OpenAiModel
from pawl.agent_loop.domain import retry
from pawl.agent_loop.domain.model import CallPiece, Finished, ModelError, ModelRequest, Piece, Problem, TextPiece
from pawl.agent_loop.domain.run import FailureClass
from tests.rpc.agent_loop.model.model_http import HI, STOP, Exchange, Script, answer, model_http

NOW = 1_800_000_000.0
DONE = "[DONE]"
ANSWER = [TextPiece(text="Hi"), Finished(reason="stop")]


def request(**fields: Any) -> ModelRequest:
    return ModelRequest(**{"model": "m", "messages": ({"role": "user", "content": "Hello"},), **fields})


def client(url: str) -> OpenAiModel:
    return OpenAiModel(base_url=url, api_key="sk-secret", now=lambda: NOW)


async def collect(model: OpenAiModel, asked: ModelRequest | None = None) -> list[Piece]:
    async with aclosing(model.stream(asked or request())) as pieces:
        return [piece async for piece in pieces]


async def call(script: Script, **fields: Any) -> list[Piece]:
    async with model_http(script) as server, client(server.url) as model:
        return await collect(model, request(**fields))


async def fail(script: Script, **fields: Any) -> Problem:
    with pytest.raises(ModelError) as caught:
        await call(script, **fields)
    return caught.value.problem


async def test_the_request_carries_what_was_asked_and_nothing_else() -> None:
    async with model_http(answer) as server, client(server.url) as model:
        await collect(
            model,
            request(
                tools=({"type": "function", "function": {"name": "f"}},),
                tool_choice="required",
                temperature=0.5,
                output_tokens_max=7,
                response_format={"type": "json_object"},
                reasoning_effort="low",
            ),
        )
        await collect(model)
    full, plain = (exchange.body for exchange in server.exchanges)
    assert full == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "temperature": 0.5,
        "max_completion_tokens": 7,
        "response_format": {"type": "json_object"},
        "reasoning_effort": "low",
    }
    assert set(plain) == {"model", "messages", "stream", "stream_options"}
    assert server.exchanges[0].head.startswith("POST /v1/chat/completions ")
    assert "authorization: bearer sk-secret" in server.exchanges[0].head.lower()


async def test_tools_with_a_dot_go_out_without_it_and_come_back_with_it() -> None:
    async def script(exchange: Exchange) -> None:
        function = {"name": "time__now", "arguments": "{}"}
        message = {"tool_calls": [{"index": 0, "id": "c", "function": function}]}
        await exchange.respond(200, json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}))

    async with model_http(script) as server, client(server.url) as model:
        pieces = await collect(model, request(tools=({"type": "function", "function": {"name": "time.now"}},)))
    assert [piece.name for piece in pieces if isinstance(piece, CallPiece)] == ["time.now"]
    assert server.exchanges[0].body["tools"][0]["function"]["name"] == "time__now"


async def test_calls_one_after_the_other_share_a_connection() -> None:
    async with model_http(answer) as server, client(server.url) as model:
        for _ in range(5):
            assert await collect(model) == ANSWER
        assert server.connections == 1


async def test_a_json_body_instead_of_a_stream_is_an_answer() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.respond(200, '{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}')

    assert await call(script) == ANSWER


async def test_pieces_come_as_they_are_sent() -> None:
    taken = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.events(HI)
        await taken.wait()
        await exchange.events(STOP, DONE)
        await exchange.end()

    async with (
        model_http(script) as server,
        client(server.url) as model,
        aclosing(model.stream(request())) as pieces,
    ):
        assert await anext(pieces) == TextPiece(text="Hi")
        taken.set()
        assert [piece async for piece in pieces] == [Finished(reason="stop")]


@pytest.mark.parametrize(
    ("status", "failure_class", "retryable"),
    [
        (400, FailureClass.PROVIDER, False),
        (401, FailureClass.AUTH, False),
        (403, FailureClass.AUTH, False),
        (404, FailureClass.PROVIDER, False),
        (408, FailureClass.PROVIDER, True),
        (409, FailureClass.PROVIDER, True),
        (422, FailureClass.PROVIDER, False),
        (429, FailureClass.RATE, True),
        (500, FailureClass.PROVIDER, True),
        (503, FailureClass.PROVIDER, True),
        (529, FailureClass.PROVIDER, True),
    ],
)
async def test_the_status_code_alone_says_what_failed(
    status: int, failure_class: FailureClass, retryable: bool
) -> None:
    """C13: a text that speaks of 429 and timeouts changes nothing. And nothing is retried here."""

    async def script(exchange: Exchange) -> None:
        await exchange.respond(status, '{"error":{"message":"429 rate limit timeout sk-secret","code":"429"}}')

    async with model_http(script) as server, client(server.url) as model:
        with pytest.raises(ModelError) as caught:
            await collect(model)
        assert len(server.exchanges) == 1
    error = caught.value.problem
    assert (error.reason, error.failure_class, error.retryable) == (f"HTTP_{status}", failure_class, retryable)
    assert "sk-secret" not in error.message


@pytest.mark.parametrize(
    ("status", "code", "refuses"),
    [
        (400, "invalid_image", True),
        (404, "", True),
        (413, "", True),
        (422, "", True),
        (400, "context_length_exceeded", False),
        (400, "invalid_api_key", False),
        (402, "", False),
        (403, "", False),
        (429, "", False),
        (500, "", False),
    ],
)
async def test_only_a_refusal_of_what_is_said_is_one(status: int, code: str, refuses: bool) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.respond(status, json.dumps({"error": {"message": "no", "code": code}}))

    problem = await fail(script)
    assert problem.refuses_content is refuses
    assert (retry.failure_of(problem).reason == "PROVIDER_REFUSED") is refuses


@pytest.mark.parametrize(
    "body",
    [
        '{"error":{"message":"no room, sk-secret"}}',
        '{"error":"no room, sk-secret"}',
        '{"detail":"no room, sk-secret"}',
        '{"detail":[{"msg":"no room, sk-secret"}]}',
        '[{"error":{"message":"no room, sk-secret"}}]',
        "no room, sk-secret",
        "<html><body>no room, <b>sk-secret</b></body></html>",
    ],
)
@pytest.mark.parametrize("status", [400, 403, 404, 429, 502])
async def test_the_words_of_a_refusal_are_kept_in_whatever_shape(status: int, body: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.respond(status, body)

    assert (await fail(script)).message.endswith(f"(HTTP {status}): no room, ***.")


async def test_a_code_that_names_the_credential_counts_more_than_the_status() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.respond(400, '{"error":{"message":"sk-... is wrong","code":"invalid_api_key"}}')

    error = await fail(script)
    assert (error.reason, error.failure_class, error.retryable) == ("HTTP_401", FailureClass.AUTH, False)
    assert "wrong" not in error.message


async def test_a_page_with_status_200_keeps_its_words() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.respond(200, "<html><head><title>Sign in</title></head></html>")

    error = await fail(script)
    assert error.reason == "STREAM_GARBLED"
    assert error.message.endswith(": Sign in.")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("Retry-After: 7\r\n", 7.0),
        ("Retry-After: 7\r\nretry-after-ms: 1500\r\n", 1.5),
        ("retry-after-ms: 20\r\n", 0.02),
        ("Retry-After: 7\r\nretry-after-ms: soon\r\n", 7.0),
        ("retry-after-ms: inf\r\n", None),
        ("Retry-After: 0.5\r\n", 0.5),
        (f"Retry-After: {formatdate(NOW + 30, usegmt=True)}\r\n", 30.0),
        (f"Retry-After: {formatdate(NOW - 30, usegmt=True)}\r\n", 0.0),
        ("Retry-After: -3\r\n", 0.0),
        ("Retry-After: soon\r\n", None),
        ("Retry-After: nan\r\n", None),
        ("Retry-After: Wed, 99 Foo 2030 99:99:99 GMT\r\n", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_read_in_both_forms(status: int, header: str, seconds: float | None) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.respond(status, "{}", header)

    assert (await fail(script)).retry_after_seconds == seconds


async def test_a_server_that_cannot_be_reached_is_a_network_failure() -> None:
    async with client("http://127.0.0.1:9/v1") as model:
        with pytest.raises(ModelError) as caught:
            await collect(model)
    assert (caught.value.problem.reason, caught.value.problem.retryable) == ("NETWORK", True)


async def test_a_connection_closed_before_the_headers_is_a_network_failure() -> None:
    async def script(exchange: Exchange) -> None:
        exchange.writer.close()

    assert (await fail(script)).reason == "NETWORK"


async def test_a_connection_closed_in_the_middle_is_a_truncated_stream() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.events(HI)
        exchange.writer.close()

    error = await fail(script)
    assert (error.reason, error.retryable) == ("STREAM_TRUNCATED", True)


async def test_a_connection_reset_in_the_middle_is_retryable() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.events(HI)
        exchange.writer.transport.abort()

    error = await fail(script)
    assert error.reason in {"NETWORK", "STREAM_TRUNCATED"}
    assert error.retryable


async def test_a_connection_lost_after_the_finish_reason_harms_nothing() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.events(HI, STOP)
        exchange.writer.close()

    assert await call(script) == ANSWER


async def test_a_server_that_does_not_close_after_its_end_is_not_waited_for() -> None:
    left = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.events(HI, STOP, DONE)
        await exchange.client_left()
        left.set()

    async with model_http(script) as server, client(server.url) as model:
        assert await collect(model) == ANSWER
        await left.wait()


async def test_a_server_that_does_not_begin_to_answer_is_given_up() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.client_left()

    error = await fail(script, headers_timeout_seconds=0.05)
    assert (error.reason, error.failure_class, error.retryable) == ("HEADERS_TIMEOUT", FailureClass.PROVIDER, True)


async def test_a_silent_stream_is_given_up() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.events(HI)
        await exchange.client_left()

    error = await fail(script, idle_timeout_seconds=0.05)
    assert (error.reason, error.failure_class, error.retryable) == ("IDLE_TIMEOUT", FailureClass.PROVIDER, True)


async def test_comments_are_life_signs() -> None:
    """D11: ten comments 0.6 s apart keep a stream alive whose idle limit is 5 s."""

    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        for _ in range(10):
            await exchange.chunk(": keep-alive\n\n")
            await asyncio.sleep(0.6)
        await exchange.events(HI, STOP, DONE)
        await exchange.end()

    assert await call(script, idle_timeout_seconds=5) == ANSWER


@pytest.mark.parametrize("begins", [True, False])
async def test_life_signs_do_not_extend_the_round(begins: bool) -> None:
    """D11: the round limit still holds, and it is typed apart from the provider's faults."""

    async def script(exchange: Exchange) -> None:
        if begins:
            await exchange.start_stream()
            while True:
                await exchange.chunk(": keep-alive\n\n")
                await asyncio.sleep(0.01)
        await exchange.client_left()

    error = await fail(script, deadline_seconds=0.1)
    assert (error.reason, error.failure_class, error.retryable) == ("ROUND_TIMEOUT", FailureClass.LIMIT, False)


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_stopping_closes_the_connection(how: str) -> None:
    """C5: the server sees the client leave, so it stops paying for the answer."""
    left = asyncio.Event()
    streaming = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.events(HI)
        await exchange.client_left()
        left.set()

    async def consume(model: OpenAiModel) -> None:
        async with aclosing(model.stream(request())) as pieces:
            async for _ in pieces:
                streaming.set()
                if how == "close":
                    return

    async with model_http(script) as server, client(server.url) as model:
        consumer = asyncio.create_task(consume(model))
        await streaming.wait()
        if how == "cancel":
            consumer.cancel()
        await asyncio.gather(consumer, return_exceptions=True)
        await left.wait()


async def test_cancelling_before_the_headers_closes_the_connection() -> None:
    left = asyncio.Event()
    asked = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        asked.set()
        await exchange.client_left()
        left.set()

    async with model_http(script) as server, client(server.url) as model:
        consumer = asyncio.create_task(collect(model))
        await asked.wait()
        consumer.cancel()
        await asyncio.gather(consumer, return_exceptions=True)
        await left.wait()


async def test_a_slow_consumer_is_not_mistaken_for_a_silent_server() -> None:
    """Deadlines count only while the next piece is awaited."""

    async def script(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.events(HI)
        await exchange.events(STOP, DONE)
        await exchange.end()

    async with model_http(script) as server, client(server.url) as model:
        pieces = []
        async with aclosing(model.stream(request(idle_timeout_seconds=1))) as stream:
            async for piece in stream:
                pieces.append(piece)
                await asyncio.sleep(1.5)
    assert pieces == ANSWER
