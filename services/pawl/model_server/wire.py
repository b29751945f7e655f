"""Encodes a reply as server-sent events or as one JSON document."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pawl.model_server.script import Reply, ToolCall

MODEL_ID = "pawl-scripted"
DONE = b"data: [DONE]\n\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    completion_id: str
    created_unix_seconds: int
    prompt_characters: int
    include_usage: bool


def event(payload: Any) -> bytes:
    """Return one server-sent event. If `payload` is text, it is sent unchanged."""
    data = payload.encode() if isinstance(payload, str) else msgspec.json.encode(payload)
    return b"data: " + data + b"\n\n"


def stream_events(reply: Reply, envelope: Envelope) -> list[bytes]:
    """Return the events of a streamed answer, except for `[DONE]`."""
    choices = [[_choice(delta)] for delta in _deltas(reply, envelope)]
    payloads = [_chunk(envelope, each) for each in (*choices, [_choice({}, finish_reason(reply))])]
    if envelope.include_usage:
        payloads.append({**_chunk(envelope, []), "usage": usage(reply, envelope)})
    return [event(payload) for payload in payloads]


def completion(reply: Reply, envelope: Envelope) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            _call(envelope, number, call.name, arguments_text(call)) for number, call in enumerate(reply.tool_calls)
        ]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(reply)}
    body = {**_chunk(envelope, [choice]), "object": "chat.completion", "usage": usage(reply, envelope)}
    return msgspec.json.encode(body)


def finish_reason(reply: Reply) -> str:
    return reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")


def arguments_text(call: ToolCall) -> str:
    """Return a call's arguments as text. An object becomes compact JSON, and a string is unchanged."""
    if isinstance(call.arguments, str):
        return call.arguments
    return json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":"))


def usage(reply: Reply, envelope: Envelope) -> dict[str, Any]:
    """Return token counts, estimated at four characters per token."""
    prompt = -(-envelope.prompt_characters // 4)
    reasoning = -(-len(reply.reasoning) // 4)
    characters = len(reply.text) + sum(len(call.name) + len(arguments_text(call)) for call in reply.tool_calls)
    completed = reasoning + -(-characters // 4)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completed,
        "total_tokens": prompt + completed,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def _deltas(reply: Reply, envelope: Envelope) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    for field, text in (("reasoning_content", reply.reasoning), ("content", reply.text)):
        for piece in _pieces(text, reply):
            yield {field: piece}
    for number, call in enumerate(reply.tool_calls):
        yield {"tool_calls": [{"index": number, **_call(envelope, number, call.name, "")}]}
        for piece in _pieces(arguments_text(call), reply):
            yield {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}


def _call(envelope: Envelope, number: int, name: str, arguments: str) -> dict[str, Any]:
    # The completion id makes the call id unique across answers.
    identity = f"call_{envelope.completion_id.removeprefix('chatcmpl-')}_{number}"
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _pieces(text: str, reply: Reply) -> Iterator[str]:
    length = reply.chunk_characters
    return (text[start : start + length] for start in range(0, len(text), length))


def _choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


def _chunk(envelope: Envelope, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": envelope.completion_id,
        "object": "chat.completion.chunk",
        "created": envelope.created_unix_seconds,
        "model": MODEL_ID,
        "choices": choices,
    }
