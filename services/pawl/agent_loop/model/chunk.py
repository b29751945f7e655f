"""Converts one chunk of a model's stream, or a whole completion, into pieces.

Servers differ wherever the protocol leaves room, and sometimes where it does not. The parser accepts everything that it
can interpret. Anything else is STREAM_GARBLED.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from pawl.agent_loop.model import failure, fields
from pawl.agent_loop.model.request import (
    CallPiece,
    Finished,
    ModelError,
    Piece,
    ProviderState,
    ReasoningPiece,
    RefusalPiece,
    TextPiece,
    UsageReport,
)
from pawl.chassis.strict_json import storable

_NULL: Final = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    index: Any = 0
    delta: msgspec.Raw = _NULL
    message: msgspec.Raw = _NULL
    finish_reason: Any = None
    usage: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice | None] | None = None
    usage: Any = None
    error: Any = None
    object: Any = None
    message: Any = None
    detail: Any = None
    code: Any = None
    type: Any = None


class _TextDelta(msgspec.Struct, forbid_unknown_fields=True):
    content: str
    role: msgspec.Raw = _NULL
    refusal: None = None
    reasoning: None = None
    reasoning_content: None = None
    tool_calls: None = None
    function_call: None = None


class _TextChoice(msgspec.Struct):
    delta: _TextDelta
    index: Literal[0] = 0
    finish_reason: None = None
    usage: None = None


class _TextChunk(msgspec.Struct):
    """A chunk that contains only text, like nearly all chunks.

    A `_Chunk` would produce the same piece, but more slowly.
    """

    choices: tuple[_TextChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: None = None
    error: None = None
    type: None = None


_text_chunks: Final = msgspec.json.Decoder(_TextChunk)
_chunks: Final = msgspec.json.Decoder(_Chunk)
_objects: Final = msgspec.json.Decoder(fields.RawObject | None)
_lists: Final = msgspec.json.Decoder(list[msgspec.Raw] | None)

_DELTA: Final = frozenset(
    {"role", "content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call"}
)
_CALL: Final = frozenset({"index", "id", "type", "function"})
_FUNCTION: Final = frozenset({"name", "arguments"})
# A JSON escape; group 1 is a lone surrogate.
_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u([dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_MARKED_ESCAPE: Final = re.compile(rb"\\uffffd[89a-f][0-9a-f]{2}")
_MARKED: Final = re.compile("\uffff(d[89a-f][0-9a-f]{2})")
# A string, complete or not, so that nothing inside it is matched; or a number that JSON does not allow.
_STRING_OR_NO_NUMBER: Final = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|-?\b(?:NaN|Infinity)\b', re.DOTALL)


def pieces(data: bytes, *, whole: bool = False) -> list[Piece]:
    """Return the pieces of a chunk, or of a `chat.completion` if `whole` is set.

    Only the first choice is used. Reasoning that a server sends under both field names is used once. NaN and Infinity,
    which some servers write for missing numbers, count as null. Text may contain NUL and lone surrogates.

    Raises:
        ModelError: STREAM_GARBLED, or the error that the server reports.
    """
    if not whole and (text := _only_text(data)) is not None:
        return [TextPiece(text=text)] if text else []
    try:
        chunk = _decoded(data)
        if _is_error(chunk):
            raise ModelError(failure.reported(msgspec.to_builtins(msgspec.structs.replace(chunk, choices=None))))
        found = [piece for choice in chunk.choices or () for piece in _choice(choice, whole=whole)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ModelError(failure.garbled(data)) from None
    return found + _usage(chunk.usage)


def _only_text(data: bytes) -> str | None:
    """Return the text of a `_TextChunk`, or None if the chunk must be parsed as a `_Chunk`."""
    if _may_have_surrogates(data):
        return None
    try:
        return _text(_text_chunks.decode(data).choices[0].delta.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _may_have_surrogates(data: bytes) -> bool:
    return b"\\ud" in data or b"\\uD" in data


def _decoded(data: bytes) -> _Chunk:
    if _may_have_surrogates(data):
        # The decoder refuses lone surrogates, so replace each with a noncharacter and its digits.
        data = _ESCAPE.sub(lambda found: rb"\uffff" + found[1].lower() if found[1] else found[0], data)
    try:
        return _chunks.decode(data)
    except msgspec.DecodeError:
        if b"NaN" not in data and b"Infinity" not in data:
            raise
    return _chunks.decode(
        _STRING_OR_NO_NUMBER.sub(lambda found: found[0] if found[0].startswith(b'"') else b"null", data)
    )


def _is_error(chunk: _Chunk) -> bool:
    if chunk.error or chunk.object == "error" or chunk.type == "error":
        return True
    return chunk.choices is None and bool(chunk.detail or chunk.message)


def _choice(choice: _Choice | None, *, whole: bool) -> Iterator[Piece]:
    if choice is None or choice.index:
        return
    delta = _objects.decode(choice.message if whole else choice.delta)
    if delta is not None:
        yield from _delta(delta)
    yield from _usage(choice.usage)
    if choice.finish_reason or whole:
        yield Finished(reason=storable(_text(choice.finish_reason)))


def _delta(delta: fields.RawObject) -> Iterator[Piece]:
    if more := fields.unknown(delta, _DELTA):
        yield ProviderState(fields_json=_written(more))
    if reasoning := _text(_value(delta, "reasoning_content")) or _text(_value(delta, "reasoning")):
        yield ReasoningPiece(text=reasoning)
    yield from _content(_value(delta, "content"))
    if refusal := _text(_value(delta, "refusal")):
        yield RefusalPiece(text=refusal)
    for call in map(_objects.decode, _lists.decode(delta.get("tool_calls", _NULL)) or ()):
        if call is not None:
            yield _call(call)
    if bytes(function := delta.get("function_call", _NULL)) != b"null":
        yield _call({"function": function})


def _content(content: Any) -> Iterator[Piece]:
    if not isinstance(content, list):
        if written := _text(content):
            yield TextPiece(text=written)
        return
    for part in content:
        if not isinstance(part, dict):
            continue
        if written := _text(part.get("text")):
            yield TextPiece(text=written)
        for thought in part.get("thinking") or ():
            if isinstance(thought, dict) and (reasoning := _text(thought.get("text"))):
                yield ReasoningPiece(text=reasoning)


def _call(call: fields.RawObject) -> CallPiece:
    function = _objects.decode(call.get("function", _NULL)) or {}
    more = fields.unknown(call, _CALL)
    if inside := fields.unknown(function, _FUNCTION):
        more[fields.FUNCTION] = msgspec.Raw(_written(inside))
    index = _value(call, "index")
    return CallPiece(
        index=index if type(index) is int else None,
        call_id=storable(_text(_value(call, "id"))),
        name=storable(_text(_value(function, "name"))),
        arguments=_arguments(bytes(function.get("arguments", _NULL))),
        fields_json=_written(more),
    )


def _value(whole: fields.RawObject, name: str) -> Any:
    return msgspec.json.decode(whole.get(name, _NULL))


def _arguments(raw: bytes) -> str:
    """Return arguments as text. They are usually a JSON string, but sometimes null or the object itself."""
    if raw == b"null":
        return ""
    return _text(msgspec.json.decode(raw)) if raw.startswith(b'"') else _MARKED_ESCAPE.sub(rb"\\ufffd", raw).decode()


def _written(more: fields.RawObject) -> bytes:
    return _MARKED_ESCAPE.sub(rb"\\ufffd", msgspec.json.encode(more) if more else b"")


def _usage(usage: Any) -> list[Piece]:
    if not isinstance(usage, dict):
        return []
    prompt = usage.get("prompt_tokens_details")
    completion = usage.get("completion_tokens_details")
    cached = prompt.get("cached_tokens") if isinstance(prompt, dict) else None
    reasoning = completion.get("reasoning_tokens") if isinstance(completion, dict) else None
    report = UsageReport(
        input_tokens=_count(usage.get("prompt_tokens")),
        cached_input_tokens=_count(cached if cached is not None else usage.get("prompt_cache_hit_tokens")),
        output_tokens=_count(usage.get("completion_tokens")),
        reasoning_tokens=_count(reasoning),
    )
    return [report]


def _count(value: Any) -> int:
    return min(max(value, 0), 2**53) if type(value) is int else 0


def _text(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    return _MARKED.sub(lambda found: chr(int(found[1], 16)), value) if "\uffff" in value else value
