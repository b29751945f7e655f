"""One chunk of a model's stream, or one whole completion, to pieces.

Servers differ in everything that the protocol leaves open, and in some things
that it does not. What can be understood is understood; what cannot is
STREAM_GARBLED. See `pieces`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

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

_EMPTY: Final = msgspec.Raw(b"")


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: Any = None
    arguments: msgspec.Raw = _EMPTY


class _LooseFunction(_Function, forbid_unknown_fields=False):
    pass


class _ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    index: Any = None
    id: Any = None
    type: Any = None
    function: _Function | None = None


class _LooseToolCall(_ToolCall, forbid_unknown_fields=False):
    function: _LooseFunction | None = None


class _Delta(msgspec.Struct, forbid_unknown_fields=True):
    role: Any = None
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: _LooseFunction | None = None


class _LooseDelta(_Delta, forbid_unknown_fields=False):
    pass


class _Choice(msgspec.Struct):
    index: Any = 0
    delta: msgspec.Raw = _EMPTY
    message: msgspec.Raw = _EMPTY
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


_chunks: Final = msgspec.json.Decoder(_Chunk)
_texts: Final = msgspec.json.Decoder(str)
_deltas: Final = msgspec.json.Decoder(_Delta)
_loose_deltas: Final = msgspec.json.Decoder(_LooseDelta)
_calls: Final = msgspec.json.Decoder(_ToolCall | None)
_loose_calls: Final = msgspec.json.Decoder(_LooseToolCall)

_NOTHING: Final = (b"", b"null")
_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u([dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape of JSON; group 1 is a lone surrogate."""
_MARKED_ESCAPE: Final = re.compile(rb"\\uffffd[89a-f][0-9a-f]{2}")
_MARKED: Final = re.compile("\uffff(d[89a-f][0-9a-f]{2})")
# A string, whole or not, so that nothing inside one is found; or a number that JSON does not have.
_STRING_OR_NO_NUMBER: Final = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|-?\b(?:NaN|Infinity)\b', re.DOTALL)


def pieces(data: bytes, *, whole: bool = False) -> list[Piece]:
    """Return the pieces of a chunk; `whole` says that it is a `chat.completion`.

    Only the first choice counts. Where a server sends reasoning under both of
    its names, it is taken once. NaN and Infinity, which some servers write where
    there is no number, count as null. Texts may hold NUL and lone surrogates.

    Raises:
        ModelError: STREAM_GARBLED, or the error that the server reports.
    """
    try:
        chunk = _decoded(data)
        if _is_error(chunk):
            raise ModelError(failure.reported(msgspec.to_builtins(msgspec.structs.replace(chunk, choices=None))))
        if not whole and (text_piece := _only_text(chunk)) is not None:
            return [text_piece]
        found = [piece for choice in chunk.choices or () for piece in _choice(choice, whole=whole)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ModelError(failure.garbled(data)) from None
    return found + _usage(chunk.usage)


def _decoded(data: bytes) -> _Chunk:
    if b"\\ud" in data or b"\\uD" in data:
        # The decoder refuses lone surrogates, so a noncharacter and their digits replace them.
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


def _only_text(chunk: _Chunk) -> TextPiece | None:
    """Return the piece of a chunk that holds text and nothing else, as nearly all do."""
    if chunk.choices is None or len(chunk.choices) != 1 or chunk.usage is not None:
        return None
    choice = chunk.choices[0]
    if choice is None or choice.index or choice.finish_reason or choice.usage is not None:
        return None
    try:
        delta = _deltas.decode(choice.delta)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    content = delta.content
    if type(content) is not str or delta != _Delta(role=delta.role, content=content):
        return None
    written = _text(content)
    return TextPiece(text=written) if written else None


def _choice(choice: _Choice | None, *, whole: bool) -> Iterator[Piece]:
    if choice is None or choice.index:
        return
    delta = choice.message if whole else choice.delta
    if bytes(delta) not in _NOTHING:
        yield from _delta(delta)
    yield from _usage(choice.usage)
    if choice.finish_reason or whole:
        yield Finished(reason=storable(_text(choice.finish_reason)))


def _delta(data: msgspec.Raw) -> Iterator[Piece]:
    try:
        delta = _deltas.decode(data)
    except msgspec.ValidationError:
        delta = _loose_deltas.decode(data)
        if more := fields.unknown(data, _Delta.__struct_fields__):
            yield ProviderState(fields_json=_written(more))
    if reasoning := _text(delta.reasoning_content) or _text(delta.reasoning):
        yield ReasoningPiece(text=reasoning)
    yield from _content(delta.content)
    if refusal := _text(delta.refusal):
        yield RefusalPiece(text=refusal)
    for call in delta.tool_calls or ():
        yield from _tool_call(call)
    if delta.function_call is not None:
        yield _call(None, None, delta.function_call)


def _content(content: Any) -> Iterator[Piece]:
    """Give the text of a message: a string, or parts, of which some may be reasoning."""
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


def _tool_call(data: msgspec.Raw) -> Iterator[CallPiece]:
    try:
        call = _calls.decode(data)
        if call is not None:
            yield _call(call.index, call.id, call.function)
    except msgspec.ValidationError:
        call = _loose_calls.decode(data)
        more = fields.unknown(data, _ToolCall.__struct_fields__)
        if call.function is not None and (inside := fields.unknown_of_function(data, _Function.__struct_fields__)):
            more[fields.FUNCTION] = msgspec.Raw(_written(inside))
        yield msgspec.structs.replace(_call(call.index, call.id, call.function), fields_json=_written(more))


def _call(index: Any, call_id: Any, function: _Function | None) -> CallPiece:
    function = function or _Function()
    return CallPiece(
        index=index if type(index) is int else None,
        call_id=storable(_text(call_id)),
        name=storable(_text(function.name)),
        arguments=_text(_arguments(bytes(function.arguments))),
    )


def _arguments(raw: bytes) -> str:
    """Return the text of arguments: usually a JSON string, sometimes null or the object itself."""
    if raw in {b"", b"null"}:
        return ""
    return _texts.decode(raw) if raw.startswith(b'"') else _MARKED_ESCAPE.sub(rb"\\ufffd", raw).decode()


def _written(more: fields.RawObject) -> bytes:
    return _MARKED_ESCAPE.sub(rb"\\ufffd", fields.written(more))


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
