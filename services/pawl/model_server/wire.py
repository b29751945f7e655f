"""Turns a reply into the bytes of the protocol: server-sent events, or one JSON document."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pawl.model_server.reply import ReasoningField, Reply, ToolCall

MODEL_ID = "pawl-scripted"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The data that one answer needs beside its content."""

    completion_id: str
    created_unix_seconds: int
    prompt_characters: int
    reasoning_field: ReasoningField
    include_usage: bool


def event(payload: Any) -> bytes:
    """One server-sent event; text is sent as it is."""
    data = payload.encode() if isinstance(payload, str) else msgspec.json.encode(payload)
    return b"data: " + data + b"\n\n"


def stream_events(reply: Reply, envelope: Envelope) -> list[bytes]:
    """The events of a streamed answer from the first chunk to the last, without `[DONE]`."""
    deltas = list(_deltas(reply, envelope))
    used = usage(reply, envelope)
    payloads: list[dict[str, Any]] = [_chunk(envelope, [_choice(delta)]) for delta in deltas]
    if reply.usage == "first":
        payloads[0]["usage"] = used
    if reply.usage == "every":
        for payload in payloads:
            payload["usage"] = used
    finish = finish_reason(reply)
    if finish is not None:
        last = _chunk(envelope, [_choice({}, finish)])
        if reply.usage in ("finish", "every"):
            last["usage"] = used
        payloads.append(last)
    if reply.usage == "end" and envelope.include_usage:
        payloads.append({**_chunk(envelope, []), "usage": used})
    comment = KEEP_ALIVE if reply.keep_alive_comments else b""
    return [comment + event(payload) for payload in payloads]


def null_choices(envelope: Envelope) -> bytes:
    """A chunk whose `choices` is null."""
    return event({**_chunk(envelope, []), "choices": None})


def completion(reply: Reply, envelope: Envelope) -> bytes:
    """The answer as one JSON document."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None, "refusal": reply.refusal or None}
    if reply.reasoning:
        message |= _reasoning(reply.reasoning, envelope)
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": _call_id(call, envelope, n), "type": "function", "function": {"name": call.name, "arguments": text}}
            for n, call in enumerate(reply.tool_calls)
            for text in [arguments_text(call)]
        ]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(reply)}
    body = {**_chunk(envelope, [choice]), "object": "chat.completion"}
    if reply.usage != "never":
        body["usage"] = usage(reply, envelope)
    return msgspec.json.encode(body)


def finish_reason(reply: Reply) -> str | None:
    """The finish reason as told, or the one that fits the content."""
    if reply.finish_reason is not msgspec.UNSET:
        return reply.finish_reason
    return "tool_calls" if reply.tool_calls else "stop"


def arguments_text(call: ToolCall) -> str:
    """The arguments as they are sent: an object as compact JSON, text untouched."""
    if isinstance(call.arguments, str):
        return call.arguments
    return json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":"))


def usage(reply: Reply, envelope: Envelope) -> dict[str, Any]:
    """Token counts: as told, or estimated at four characters a token, since there is no tokenizer here."""
    if reply.usage_tokens is not None:
        return reply.usage_tokens
    prompt = -(-envelope.prompt_characters // 4)
    reasoning = -(-len(reply.reasoning) // 4)
    said = len(reply.text) + len(reply.refusal) + sum(len(c.name) + len(arguments_text(c)) for c in reply.tool_calls)
    completed = reasoning + -(-said // 4)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completed,
        "total_tokens": prompt + completed,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def _deltas(reply: Reply, envelope: Envelope) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    for piece in _pieces(reply.reasoning, reply.chunk_characters):
        yield _reasoning(piece, envelope)
    for piece in _pieces(reply.text, reply.chunk_characters):
        yield {"content": piece}
    for piece in _pieces(reply.refusal, reply.chunk_characters):
        yield {"refusal": piece}
    for number, call in enumerate(reply.tool_calls):
        yield from _call_deltas(call, number, reply, envelope)


def _call_deltas(call: ToolCall, number: int, reply: Reply, envelope: Envelope) -> Iterator[dict[str, Any]]:
    index = number if call.index is msgspec.UNSET else call.index
    place = {} if index is None else {"index": index}
    identity = _call_id(call, envelope, number)
    head: dict[str, Any] = {**place, "type": "function", "function": {"name": call.name, "arguments": ""}}
    if identity:
        head["id"] = identity
    yield {"tool_calls": [head]}
    for piece in _pieces(arguments_text(call), reply.argument_characters):
        yield {"tool_calls": [{**place, "function": {"arguments": piece}}]}


def _call_id(call: ToolCall, envelope: Envelope, number: int) -> str:
    """Unique over all answers, because it contains the id of the answer."""
    return f"call_{envelope.completion_id.removeprefix('chatcmpl-')}_{number}" if call.id is msgspec.UNSET else call.id


def _reasoning(text: str, envelope: Envelope) -> dict[str, str]:
    fields = ("reasoning_content", "reasoning") if envelope.reasoning_field == "both" else (envelope.reasoning_field,)
    return dict.fromkeys(fields, text)


def _pieces(text: str, length: int) -> Iterator[str]:
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
