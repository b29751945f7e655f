"""The model server on a real socket: the openai client sends valid requests, and raw bytes test faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from pawl.model_server.script import Script, parse_script
from pawl.model_server.server import ModelServer
from tests.poll import until

CALCULATE: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def script(*replies: dict[str, Any]) -> Script:
    return parse_script(json.dumps({"steps": [{"reply": reply} for reply in replies]}))


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer() as server:
        yield server


@pytest.fixture
async def client(server: ModelServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="x", max_retries=0) as client:
        yield client


async def stream(client: openai.AsyncOpenAI, prompt: str = "hello", **more: Any) -> list[ChatCompletionChunk]:
    answer = await client.chat.completions.create(
        model="pawl-scripted", messages=[{"role": "user", "content": prompt}], stream=True, **more
    )
    async with answer:
        return [chunk async for chunk in answer]


def text(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def request_bytes(connection: str = "keep-alive") -> bytes:
    body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def raw(server: ModelServer, request: bytes | None = None) -> bytes:
    host, port = server.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request or request_bytes("close"))
    try:
        return await reader.read()
    finally:
        writer.close()


async def ended(server: ModelServer, outcome: str) -> None:
    await until(lambda: server.requests and server.requests[0].outcome == outcome)


async def test_streamed_answer_sends_reasoning_text_calls_finish_and_usage_in_order(
    client: openai.AsyncOpenAI,
) -> None:
    chunks = await stream(client, "what is 17 * 23", tools=[CALCULATE], stream_options={"include_usage": True})
    usage = chunks[-1].usage
    assert (chunks[-1].choices, bool(usage and usage.total_tokens)) == ([], True)
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    deltas = [chunk.choices[0].delta for chunk in chunks[1:-2]]
    kinds = ["reasoning" if "reasoning_content" in d.model_fields_set | set(d.model_extra or ()) else
             "text" if d.content else "call" for d in deltas]  # fmt: skip
    assert list(dict.fromkeys(kinds)) == ["reasoning", "text", "call"]
    fragments = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert len(fragments) > 2
    joined = "".join(f.function.arguments or "" for f in fragments if f.function)
    assert json.loads(joined) == {"expression": "17 * 23"}


async def test_answer_without_a_stream_is_one_document(client: openai.AsyncOpenAI) -> None:
    [model] = (await client.models.list()).data
    assert "rule-based stand-in" in model.model_dump()["description"]
    answer = await client.chat.completions.create(
        model=model.id, messages=[{"role": "user", "content": "what is 2+2"}], tools=[CALCULATE]
    )
    [choice] = answer.model_dump()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"], choice["finish_reason"]) == ("function", "calculate", "tool_calls")
    assert answer.usage is not None


async def test_refused_history_returns_the_openai_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="must be a response to a preceding message") as caught:
        await client.chat.completions.create(
            model="m", messages=[{"role": "tool", "tool_call_id": "a", "content": "x"}]
        )
    assert caught.value.type == "invalid_request_error"


async def test_connection_can_hang_be_reset_and_dropped(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.play(script({"fault": {"type": "hang", "after_chunks": 0}}))
    waiting = asyncio.create_task(raw(server))
    await ended(server, "fault")
    assert not waiting.done()
    waiting.cancel()
    await ended(server, "client_gone")
    for after in (0, 2):
        server.play(script({"text": "x" * 100, "fault": {"type": "reset", "after_chunks": after}}))
        with pytest.raises(ConnectionResetError):
            await raw(server)
    server.play(script({"text": "x" * 100, "fault": {"type": "drop", "after_chunks": 2}}))
    with pytest.raises(openai.APIConnectionError) as caught:
        await stream(client)
    assert "incomplete chunked read" in str(caught.value.__cause__)


ODDITIES: tuple[tuple[dict[str, Any], bytes, bytes], ...] = (
    ({"text": "x" * 100, "fault": {"type": "truncate"}}, b"\r\n0\r\n\r\n", b'finish_reason":"stop'),
    ({"text": "x", "fault": {"type": "garble"}}, b'data: {"choices": [{"delta"', b"error"),
    ({"text": "x", "fault": {"type": "error_object"}}, b'data: {"error":{', b"[DONE]"),
    ({"fault": {"type": "empty_stream"}}, b"text/event-stream", b"data:"),
    ({"text": "x", "finish_reason": "content_filter"}, b'"finish_reason":"content_filter"', b'"stop"'),
    ({"tool_calls": [{"name": "f", "arguments": "{oops"}]}, b'"arguments":"{oops"', b"error"),
)


async def test_each_stream_fault_can_be_scripted(server: ModelServer) -> None:
    """LOOP-2: a faulty stream starts with status 200."""
    for reply, present, absent in ODDITIES:
        server.play(script(reply))
        answer = await raw(server)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), reply
        assert present in answer, reply
        assert absent not in answer, reply


async def test_paced_answer_stops_when_its_client_disconnects(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    """LOOP-6: cancelling a model call makes the provider stop generating."""
    answer = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "tell me a long story very slowly"}], stream=True
    )
    await anext(answer)
    await answer.close()
    await ended(server, "client_gone")
    assert server.requests[0].chunks_sent < 10
