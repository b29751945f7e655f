"""The model server on a real socket: with the openai client where things go well, with raw bytes where they do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from pawl.model_server.script import Script, parse_script
from pawl.model_server.server import ModelServer

CALCULATE: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def script(*replies: dict[str, Any], **more: Any) -> Script:
    return parse_script(json.dumps({"steps": [{"reply": reply} for reply in replies], **more}))


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
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices or ())


async def raw(server: ModelServer, *, streaming: bool = True, prompt: str = "hello") -> bytes:
    """Everything the server sends for one request, up to the end of the connection."""
    host, port = server.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request_bytes(streaming=streaming, prompt=prompt, connection="close"))
    try:
        return await reader.read()
    finally:
        writer.close()


def request_bytes(*, streaming: bool = True, prompt: str = "hello", connection: str = "keep-alive") -> bytes:
    body = json.dumps({"model": "m", "stream": streaming, "messages": [{"role": "user", "content": prompt}]}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\ncontent-length: {len(body)}\r\n"
    )
    return head.encode() + b"\r\n" + body


async def test_models_lists_one_model_that_says_what_it_is(client: openai.AsyncOpenAI) -> None:
    [model] = (await client.models.list()).data
    assert model.id == "pawl-scripted"
    assert "rule-based stand-in" in model.model_dump()["description"]


async def test_a_tool_call_streams_in_the_order_reasoning_text_fragments_finish_usage(
    client: openai.AsyncOpenAI,
) -> None:
    chunks = await stream(client, "what is 17 * 23", tools=[CALCULATE], stream_options={"include_usage": True})
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens > 0
    assert chunks[-1].choices == []
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    deltas = [chunk.choices[0].delta for chunk in chunks[1:-2]]
    kinds = ["reasoning" if "reasoning_content" in d.model_fields_set | set(d.model_extra or ()) else
             "text" if d.content else "call" for d in deltas]  # fmt: skip
    assert list(dict.fromkeys(kinds)) == ["reasoning", "text", "call"]
    fragments = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert len(fragments) > 2
    joined = "".join(f.function.arguments or "" for f in fragments if f.function)
    assert json.loads(joined) == {"expression": "17 * 23"}


async def test_without_stream_the_answer_is_one_document(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="pawl-scripted", messages=[{"role": "user", "content": "what is 2+2"}], tools=[CALCULATE]
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].type == "function"
    assert calls[0].function.name == "calculate"
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage is not None


async def test_a_refused_history_comes_back_as_openai_s_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="must be a response to a preceding message") as caught:
        await client.chat.completions.create(
            model="m", messages=[{"role": "tool", "tool_call_id": "a", "content": "x"}]
        )
    assert caught.value.type == "invalid_request_error"


async def test_a_lenient_server_takes_it() -> None:
    async with ModelServer(strict=False) as server, openai.AsyncOpenAI(base_url=server.base_url, api_key="x") as client:
        await client.chat.completions.create(
            model="m", messages=[{"role": "tool", "tool_call_id": "a", "content": "x"}]
        )


async def test_reasoning_has_the_spelling_that_was_asked_for() -> None:
    spellings: tuple[tuple[Any, set[str]], ...] = (
        ("reasoning", {"reasoning"}),
        ("both", {"reasoning", "reasoning_content"}),
    )
    for field, fields in spellings:
        async with (
            ModelServer(reasoning_field=field) as server,
            openai.AsyncOpenAI(base_url=server.base_url, api_key="x") as client,
        ):
            chunks = await stream(client)
        assert set(chunks[1].choices[0].delta.model_extra or ()) == fields


async def test_a_status_fault_carries_body_and_retry_after(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    fault = {"type": "status", "status": 429, "body": {"error": {"message": "slow down"}}, "retry_after": 7}
    server.play(script({"fault": fault}))
    with pytest.raises(openai.RateLimitError, match="slow down") as caught:
        await stream(client)
    assert caught.value.response.headers["retry-after"] == "7"
    assert "rule-based" in text(await stream(client))


async def test_the_client_s_retry_meets_the_next_step(server: ModelServer) -> None:
    """LOOP-7"""
    failing = {
        "reply": {"fault": {"type": "status", "status": 503, "retry_after": 0.01}},
        "when": {"round": 0},
        "times": 2,
    }
    server.play(parse_script(json.dumps({"steps": [failing, {"reply": {"text": "at last"}}]})))
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="x", max_retries=2) as client:
        assert text(await stream(client)) == "at last"
    assert [recorded.status for recorded in server.requests] == [503, 503, 200]


async def test_connections_are_kept_alive(server: ModelServer) -> None:
    host, port = server.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for _ in range(3):
        writer.write(request_bytes(streaming=True))
        answer = await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert server.request_count == 3


async def test_headers_can_be_withheld_for_ever(server: ModelServer) -> None:
    server.play(script({"fault": {"type": "hang_before_headers"}}))
    waiting = asyncio.create_task(raw(server))
    await server.wait_for(lambda s: s.request_count == 1)
    assert not waiting.done()
    waiting.cancel()
    await server.wait_for(lambda s: s.requests[0].outcome == "client_gone")


async def test_a_reset_is_seen_as_a_reset(server: ModelServer) -> None:
    for after in (0, 2):
        server.play(script({"text": "x" * 100, "fault": {"type": "reset", "after_chunks": after}}))
        with pytest.raises(ConnectionResetError):
            await raw(server)


async def test_a_dropped_connection_ends_in_the_middle_of_the_body(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.play(script({"text": "x" * 100, "fault": {"type": "drop", "after_chunks": 2}}))
    with pytest.raises(openai.APIConnectionError) as caught:
        await stream(client)
    assert "incomplete chunked read" in str(caught.value.__cause__)


ODDITIES: tuple[tuple[dict[str, Any], bytes, bytes], ...] = (
    ({"text": "x" * 100, "fault": {"type": "truncate"}}, b"\r\n0\r\n\r\n", b'finish_reason":"stop'),
    ({"text": "x", "fault": {"type": "garble", "data": "{nonsense"}}, b"data: {nonsense\n\n", b"error"),
    ({"text": "x", "fault": {"type": "error_object"}}, b'data: {"error":{', b"[DONE]"),
    ({"text": "x", "fault": {"type": "null_choices"}}, b'"choices":null', b"error"),
    ({"text": "x", "fault": {"type": "json_instead_of_stream"}}, b"application/json", b"data:"),
    ({"fault": {"type": "empty_stream"}}, b"text/event-stream", b"data:"),
    ({"fault": {"type": "empty_stream", "done": True}}, b"data: [DONE]", b"choices"),
    ({"text": "x", "finish_reason": "content_filter"}, b'"finish_reason":"content_filter"', b'"stop"'),
    ({"text": "x", "finish_reason": None}, b"data: [DONE]", b'"stop"'),
    ({"refusal": "I cannot."}, b'{"refusal":"I cannot."}', b'"content":"I'),
    ({"text": "x", "keep_alive_comments": True}, b": keep-alive\n\ndata: ", b"error"),
    ({"text": "x", "usage": "first"}, b'"content":""},"logprobs":null,"finish_reason":null}],"usage"', b"error"),
    ({"text": "x", "usage": "finish"}, b'"finish_reason":"stop"}],"usage"', b"error"),
    ({"text": "x", "done_marker": False}, b'"finish_reason":"stop"', b"[DONE]"),
    ({"tool_calls": [{"name": "f", "index": None}]}, b'"tool_calls":[{"type"', b'"tool_calls":[{"index"'),
    ({"tool_calls": [{"name": "f", "arguments": ""}]}, b'"arguments":""', b"{}}"),
    ({"tool_calls": [{"name": "f", "id": ""}]}, b'"name":"f"', b'"id":"call_'),
    ({"tool_calls": [{"name": "f", "arguments": "{oops"}]}, b'"arguments":"{oops"', b"error"),
    ({"tool_calls": [{"name": "f"}, {"name": "g", "index": 0}]}, b'"name":"g"', b'"index":1'),
)


async def test_each_oddity_of_a_stream_can_be_scripted(server: ModelServer) -> None:
    """LOOP-2"""
    for reply, present, absent in ODDITIES:
        server.play(script(reply))
        answer = await raw(server)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), reply
        assert present in answer, reply
        assert absent not in answer, reply


async def test_a_call_nobody_foresaw_is_refused_on_demand(server: ModelServer) -> None:
    server.play(script(otherwise="error"))
    assert b"no_step" in await raw(server)
    assert server.requests[0].outcome == "refused"


async def test_a_paced_answer_notices_that_its_reader_left(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    """LOOP-6: a cancelled model call is cancelled at the provider."""
    answer = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "tell me a long story very slowly"}], stream=True
    )
    await anext(answer)
    await answer.close()
    await server.wait_for(lambda s: s.requests[0].outcome == "client_gone")
    assert server.requests[0].chunks_sent < 10


async def test_another_process_can_read_the_record_and_swap_the_script(server: ModelServer) -> None:
    async with httpx2.AsyncClient(base_url=f"http://{server.address}", timeout=60.0) as http:
        swapped = await http.post("/_pawl/script", json={"steps": [{"reply": {"text": "swapped"}}]})
        assert swapped.json() == {"steps": 1}
        assert b"swapped" in await raw(server)
        record = (await http.get("/_pawl/requests")).json()
        assert record["count"] == 1
        assert record["requests"][0]["outcome"] == "complete"
        assert record["requests"][0]["body"]["messages"] == [{"role": "user", "content": "hello"}]
        refused = await http.post("/_pawl/script", json={"steps": 7})
        assert refused.status_code == 400
        assert "$.steps" in refused.json()["error"]["message"]
        assert (await http.get("/nowhere")).status_code == 404


async def test_what_is_no_http_gets_400(server: ModelServer) -> None:
    host, port = server.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"nonsense\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()
