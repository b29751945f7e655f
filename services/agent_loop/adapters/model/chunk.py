"""One chunk of a model's stream, or one whole completion, to pieces.

Servers differ in everything that the protocol leaves open, and in some things
that it does not. What can be understood is understood; what cannot is
STREAM_GARBLED. See `pieces`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from services.agent_loop.adapters.model import failure
from services.agent_loop.domain import text
from services.agent_loop.domain.model import (
    CallPiece,
    Finished,
    Piece,
    ProviderState,
    ReasoningPiece,
    RefusalPiece,
    TextPiece,
    UsageReport,
)

_EMPTY: Final = msgspec.Raw(b"")


class _Function(msgspec.Struct):
    name: Any = None
    arguments: msgspec.Raw = _EMPTY


class _ToolCall(msgspec.Struct):
    index: Any = None
    id: Any = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_details: msgspec.Raw = _EMPTY
    refusal: Any = None
    tool_calls: list[_ToolCall | None] | None = None
    function_call: _Function | None = None


class _Choice(msgspec.Struct):
    index: Any = 0
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: Any = None
    usage: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice | None] | None = None
    usage: Any = None
    error: Any = None
    object: Any = None
    message: Any = None
    code: Any = None


_chunks: Final = msgspec.json.Decoder(_Chunk)
_texts: Final = msgspec.json.Decoder(str)
_items: Final = msgspec.json.Decoder(list[msgspec.Raw])


def pieces(data: bytes, *, whole: bool = False) -> list[Piece]:
    """Return the pieces of a chunk; `whole` says that it is a `chat.completion`.

    Only the first choice counts. Where a server sends reasoning under both of
    its names, it is taken once.

    Raises:
        ModelError: STREAM_GARBLED, or the error that the server reports.
    """
    try:
        chunk = _chunks.decode(data)
        if not whole and (text_piece := _only_text(chunk)) is not None:
            return [text_piece]
        found = [piece for choice in chunk.choices or () for piece in _choice(choice, whole=whole)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise failure.garbled() from None
    if chunk.error or chunk.object == "error":
        raise failure.reported(chunk.error or {"code": chunk.code, "message": chunk.message})
    return found + _usage(chunk.usage)


def _only_text(chunk: _Chunk) -> TextPiece | None:
    """Return the piece of a chunk that holds text and nothing else, as nearly all do."""
    if (
        chunk.choices is None
        or len(chunk.choices) != 1
        or chunk.usage is not None
        or chunk.error
        or chunk.object == "error"
    ):
        return None
    choice = chunk.choices[0]
    if choice is None or choice.index or choice.finish_reason or choice.usage is not None or choice.delta is None:
        return None
    delta = choice.delta
    content = delta.content
    if type(content) is not str or delta != _Delta(content=content):
        return None
    written = text.clean(content)
    return TextPiece(text=written) if written else None


def _choice(choice: _Choice | None, *, whole: bool) -> Iterator[Piece]:
    if choice is None or choice.index:
        return
    delta = choice.message if whole else choice.delta
    if delta is not None:
        yield from _delta(delta)
    yield from _usage(choice.usage)
    if choice.finish_reason or whole:
        yield Finished(reason=_text(choice.finish_reason))


def _delta(delta: _Delta) -> Iterator[Piece]:
    if reasoning := _text(delta.reasoning_content) or _text(delta.reasoning):
        yield ReasoningPiece(text=reasoning)
    yield from _provider_state(bytes(delta.reasoning_details))
    yield from _content(delta.content)
    if refusal := _text(delta.refusal):
        yield RefusalPiece(text=refusal)
    for call in delta.tool_calls or ():
        if call is not None:
            yield _call(call.index, call.id, call.function)
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


def _call(index: Any, call_id: Any, function: _Function | None) -> CallPiece:
    function = function or _Function()
    return CallPiece(
        index=index if type(index) is int else None,
        call_id=_text(call_id),
        name=_text(function.name),
        arguments=text.clean(_arguments(bytes(function.arguments))),
    )


def _arguments(raw: bytes) -> str:
    """Return the text of arguments: usually a JSON string, sometimes null or the object itself."""
    if raw in {b"", b"null"}:
        return ""
    return _texts.decode(raw) if raw.startswith(b'"') else raw.decode()


def _provider_state(data: bytes) -> Iterator[Piece]:
    for item in _items.decode(data) if data.startswith(b"[") else ():
        item_json = bytes(item)
        item_json.decode()
        yield ProviderState(field="reasoning_details", item_json=item_json)


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
    return text.clean(value) if isinstance(value, str) else ""
