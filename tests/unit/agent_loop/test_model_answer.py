"""Streams of many model servers, and the pieces that the client reads from them (LOOP-2)."""

from __future__ import annotations

import itertools
import json
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.agent_loop.loop.rules.assembly import Assembly, ModelAnswer
from pawl.agent_loop.loop.rules.run import FailureClass
from pawl.agent_loop.model import chunk as parser
from pawl.agent_loop.model.answer import ANSWER_BYTES_MAX, Answer
from pawl.agent_loop.model.request import (
    CallPiece,
    Finished,
    ModelError,
    Piece,
    Problem,
    ProviderState,
    ReasoningPiece,
    RefusalPiece,
    TextPiece,
    UsageReport,
)
from tests.tables import for_each


def event(chunk: Any) -> bytes:
    return b"data: " + (chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()) + b"\n\n"


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


STOP = delta("stop")
DONE = b"[DONE]"


def read(*chunks: Any) -> list[Piece]:
    return feed(b"".join(event(chunk) for chunk in chunks))


def feed(*data: bytes) -> list[Piece]:
    answer = Answer()
    return [piece for part in data for piece in answer.feed(part)] + answer.end()


def assemble(*chunks: Any) -> ModelAnswer:
    assembly = Assembly()
    for piece in read(*chunks):
        assembly.add(piece)
    return assembly.answer()


def call(index: Any = 0, call_id: Any = None, name: Any = None, arguments: Any = None) -> dict[str, Any]:
    return {"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}


def failed(*chunks: Any) -> Problem:
    with pytest.raises(ModelError) as caught:
        read(*chunks)
    return caught.value.problem


@for_each(
    ("chunk", "pieces"),
    [
        (delta(content="Hi"), [TextPiece(text="Hi")]),
        (delta(content=None), []),
        (delta(content=""), []),
        (delta(reasoning_content="hm"), [ReasoningPiece(text="hm")]),
        (delta(reasoning="hm"), [ReasoningPiece(text="hm")]),
        (delta(reasoning="hm", reasoning_content="hm"), [ReasoningPiece(text="hm")]),
        (delta(reasoning="hm", content="Hi"), [ReasoningPiece(text="hm"), TextPiece(text="Hi")]),
        (delta(refusal="No"), [RefusalPiece(text="No")]),
        (delta(content=[{"type": "text", "text": "Hi"}]), [TextPiece(text="Hi")]),
        (delta(content=[{"type": "thinking", "thinking": [{"text": "hm"}]}]), [ReasoningPiece(text="hm")]),
        (delta(content="a\0b"), [TextPiece(text="a\0b")]),
        (delta(tool_calls=None), []),
        (delta(tool_calls=[None]), []),
        (delta(tool_calls=[{"index": 1}]), [CallPiece(index=1)]),
        (delta(tool_calls=[{"id": "a", "function": {"name": "f"}}]), [CallPiece(call_id="a", name="f")]),
        (delta(tool_calls=[call("0", "a", "f", '{"x"')]), [CallPiece(call_id="a", name="f", arguments='{"x"')]),
        (delta(tool_calls=[call(0, "a", "f", None)]), [CallPiece(index=0, call_id="a", name="f")]),
        (delta(tool_calls=[call(0, "a", "", {"x": 1})]), [CallPiece(index=0, call_id="a", arguments='{"x": 1}')]),
        (delta(function_call={"name": "f", "arguments": "{}"}), [CallPiece(name="f", arguments="{}")]),
        ({"choices": None}, []),
        ({"choices": []}, []),
        ({"choices": [None]}, []),
        ({"choices": [{"index": 0, "delta": None}]}, []),
        ({"choices": [{"index": 1, "delta": {"content": "B"}}, {"delta": {"content": "A"}}]}, [TextPiece(text="A")]),
        ({"error": None, "choices": [{"delta": {"content": "Hi"}}]}, [TextPiece(text="Hi")]),
        (b"", []),
        ({"object": "chat.completion.chunk", "unknown": {"deep": [1]}}, []),
    ],
)
def test_a_chunk_is_parsed_into_pieces(chunk: Any, pieces: Any) -> None:
    assert read(chunk, STOP, DONE) == [*pieces, Finished(reason="stop")]


@pytest.mark.parametrize(
    "usage_chunk",
    [
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}},
        {"choices": None, "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": None}},
        {"choices": [{"delta": {}, "usage": {"prompt_tokens": 9, "completion_tokens": 4}}]},
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_usage_may_arrive_in_any_chunk(usage_chunk: Any, position: int) -> None:
    chunks = [delta(content="Hi"), STOP]
    chunks.insert(position, usage_chunk)
    assert assemble(*chunks, DONE).usage == UsageReport(input_tokens=9, output_tokens=4)


@for_each("usage", [None, 5, [], {"prompt_tokens": "many", "completion_tokens": -1}])
def test_unreadable_usage_is_ignored(usage: Any) -> None:
    assert assemble(STOP, {"usage": usage}, DONE).usage == UsageReport()


def test_reasoning_state_is_kept_byte_for_byte() -> None:
    """LOOP-11: opaque data is sent back unchanged, including number formats and escapes."""
    first = b'{"choices":[{"delta":{"reasoning_details":[{"b": 1.0,  "a":"\\u00e9"},{"x":1e2}]}}]}'
    second = b'{"choices":[{"delta":{"reasoning_details":[{"sig":"z"}]},"finish_reason":"stop"}]}'
    pieces = read(first, second, DONE)
    assert pieces[0] == ProviderState(fields_json=b'{"reasoning_details":[{"b": 1.0,  "a":"\\u00e9"},{"x":1e2}]}')
    assert assemble(first, second, DONE).provider_state_json == (
        b'{"reasoning_details":[{"b": 1.0,  "a":"\\u00e9"},{"x":1e2},{"sig":"z"}]}'
    )


def test_a_complete_response_instead_of_a_stream_is_accepted() -> None:
    message = {
        "role": "assistant",
        "content": "Hi",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}],
    }
    body = {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    data = b" \n" + json.dumps(body, indent=1).encode()
    assert feed(data[:30], data[30:]) == [
        ReasoningPiece(text="hm"),
        TextPiece(text="Hi"),
        CallPiece(call_id="a", name="f", arguments='{"x":1}'),
        UsageReport(input_tokens=1, output_tokens=2),
        Finished(reason="tool_calls"),
    ]


@for_each("reason", ["stop", "tool_calls", "length", "function_call", "end_turn", "made_up"])
def test_an_answer_may_end_with_any_finish_reason(reason: Any) -> None:
    assert read(delta(content="Hi"), delta(reason), DONE)[-1] == Finished(reason=reason)


def test_data_after_the_end_is_ignored() -> None:
    assert read(STOP, DONE, delta(content="late"), b"{garbage") == [Finished(reason="stop")]


@for_each(
    ("chunks", "reason", "failure_class", "retryable"),
    [
        ([], "EMPTY_STREAM", FailureClass.PROVIDER, True),
        ([DONE], "EMPTY_STREAM", FailureClass.PROVIDER, True),
        ([delta(role="assistant")], "EMPTY_STREAM", FailureClass.PROVIDER, True),
        ([delta(content="Hi")], "STREAM_TRUNCATED", FailureClass.PROVIDER, True),
        ([b'{"choices": [{"delta"'], "STREAM_GARBLED", FailureClass.PROVIDER, True),
        ([b"null"], "STREAM_GARBLED", FailureClass.PROVIDER, True),
        ([b'{"choices": "many"}'], "STREAM_GARBLED", FailureClass.PROVIDER, True),
        ([b'{"choices": [{"delta": {"content": "\xff"}}]}'], "STREAM_GARBLED", FailureClass.PROVIDER, True),
        ([b'{"choices":' + b"[" * 100_000], "STREAM_GARBLED", FailureClass.PROVIDER, True),
        ([{"error": {"message": "overloaded"}}], "STREAM_ERROR", FailureClass.PROVIDER, True),
        ([{"error": {"message": "401 timeout"}}], "STREAM_ERROR", FailureClass.PROVIDER, True),
        ([{"error": {"message": "no", "code": "401"}}], "HTTP_401", FailureClass.AUTH, False),
        ([{"error": {"code": "invalid_api_key"}}], "HTTP_401", FailureClass.AUTH, False),
        ([{"error": {"type": "authentication_error"}}], "HTTP_401", FailureClass.AUTH, False),
        ([{"type": "error", "error": {"type": "rate_limit_error"}}], "HTTP_429", FailureClass.RATE, True),
        ([{"error": {"code": "503"}}], "HTTP_503", FailureClass.PROVIDER, True),
        ([{"error": "broken"}, DONE], "STREAM_ERROR", FailureClass.PROVIDER, True),
        ([delta(content="Hi"), {"detail": "broken"}, DONE], "STREAM_ERROR", FailureClass.PROVIDER, True),
        ([delta(content="Hi"), {"message": "broken"}, DONE], "STREAM_ERROR", FailureClass.PROVIDER, True),
        ([delta(content="Hi"), b"Internal Server Error", DONE], "STREAM_GARBLED", FailureClass.PROVIDER, True),
        ([{"error": "plain text"}], "STREAM_ERROR", FailureClass.PROVIDER, True),
        ([{"error": {"code": 429}}], "HTTP_429", FailureClass.RATE, True),
        ([{"error": {"code": 502}}], "HTTP_502", FailureClass.PROVIDER, True),
        ([{"error": {"code": 400}}], "HTTP_400", FailureClass.PROVIDER, False),
        ([{"object": "error", "message": "bad", "code": 401}], "HTTP_401", FailureClass.AUTH, False),
        ([delta("error") | {"error": {"message": "broken"}}], "STREAM_ERROR", FailureClass.PROVIDER, True),
        ([delta(content="Hi") | {"error": {"code": 429}}], "HTTP_429", FailureClass.RATE, True),
        ([{"choices": [{"delta": "no"}], "error": {"code": 401}}], "HTTP_401", FailureClass.AUTH, False),
        ([delta(content="Hi"), delta("error")], "STREAM_ERROR", FailureClass.PROVIDER, True),
        ([delta(content="Hi"), delta("content_filter"), DONE], "CONTENT_FILTER", FailureClass.CONTENT_FILTER, False),
    ],
)
def test_each_stream_fault_has_a_reason_and_error_class(
    chunks: Any, reason: str, failure_class: Any, retryable: bool
) -> None:
    error = failed(*chunks)
    assert (error.reason, error.failure_class, error.retryable) == (reason, failure_class, retryable)


@for_each(
    ("data", "ending"),
    [
        (event({"error": "out of memory"}), "reported an error: out of memory."),
        (event({"error": {"message": "out of memory."}}), "reported an error: out of memory."),
        (event({"detail": "out of memory"}), "reported an error: out of memory."),
        (event({"detail": [{"loc": ["body"], "msg": "out of memory"}]}), "reported an error: out of memory."),
        (event({"object": "error", "message": "out of memory"}), "reported an error: out of memory."),
        (event(b"out of memory"), "cannot be parsed: out of memory."),
        (b"out of memory", "cannot be parsed: out of memory."),
        (b'{"detail": "out of memory"}', "reported an error: out of memory."),
        (b"<html><head><style>a</style></head><body><h1>out of</h1>\n<p>memory</p></body>", ": out of memory."),
        (b": keep-alive\n\nevent: x\n\n", "was empty."),
    ],
)
def test_error_text_of_the_server_is_kept(data: Any, ending: str) -> None:
    with pytest.raises(ModelError) as caught:
        feed(data)
    assert caught.value.problem.message.endswith(ending)


def test_numbers_that_json_does_not_allow_are_handled() -> None:
    chunk = rb'{"choices":[{"delta":{"content":"NaN \"Infinity"},"logprobs":{"a":NaN,"b":[-Infinity,Infinity]}}]}'
    assert read(chunk, STOP, DONE) == [TextPiece(text='NaN "Infinity'), Finished(reason="stop")]


def test_unterminated_text_is_rejected_in_linear_time() -> None:
    """A search that restarted at each quotation mark would take quadratic time."""
    assert failed(b'{"a":NaN,"b":"' + rb"\"" * 1_000_000).reason == "STREAM_GARBLED"


def text(**fields: Any) -> tuple[Any, ...]:
    return tuple(delta(**{name: part}) for name, parts in fields.items() for part in parts)


def arguments(*parts: Any) -> tuple[Any, ...]:
    return tuple(delta(tool_calls=[call(0, None, "f" if n == 0 else None, part)]) for n, part in enumerate(parts))


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (text(content=["a\ud83d", "\ude00b"]), ("a😀b", "", "")),
        (text(content=["\ud83d", "\ude00"]), ("😀", "", "")),
        (text(content=["a\ud83d", "b"]), ("a\ufffdb", "", "")),
        (text(content=["a\ud83d"]), ("a\ufffd", "", "")),
        (text(content=["\ude00\ud83d\ud83db\ud83d\ude00"]), ("\ufffd\ufffd\ufffdb😀", "", "")),
        (text(content=["\ud83d"], reasoning=["\ud83d", "\ude00"]), ("\ufffd", "😀", "")),
        (text(content=["a\\\ud83d\\ud83d\uffffd83x", "\0"]), ("a\\\ufffd\\ud83d\uffffd83x", "", "")),
        (text(content=[[{"text": "a\ud83d"}], [{"text": "\ude00"}]]), ("a😀", "", "")),
        (arguments('"a\ud83d', '\ude00"'), ("", "", '"a😀"')),
        (arguments('"a\ud83d', '"'), ("", "", '"a\ufffd"')),
        (arguments({"a": "\ud83d"}), ("", "", '{"a": "\\ufffd"}')),
        ((*arguments('"\ud83d'), delta(tool_calls=[call(1, "b", "g", "1")])), ("", "", '"\ufffd')),
        ((*text(content=["a"]), delta(seal=["\ude00"])), ("a", "", "")),
    ],
)
def test_surrogate_halves_are_joined_or_replaced(chunks: Any, expected: tuple[str, str, str]) -> None:
    answer = assemble(*chunks, STOP, DONE)
    assert (answer.text, answer.reasoning, "".join(call.arguments for call in answer.calls[:1])) == expected
    msgspec.json.encode(answer)
    json.loads(answer.provider_state_json or b"{}")


def test_unknown_fields_are_kept_unchanged() -> None:
    text = rb'{"choices":[{"delta":{"content":"Hi","extra_content":{"google": {"signature":"a\u002f", "n":1e2}}}}]}'
    calls = (
        rb'{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a","type":"function","thought_signature": "s1",'
        rb'"extra_content":{"x": 1.0},"function":{"name":"f","arguments":"{}","strict": null,"note":[ 1]}},'
        rb'{"index":1,"id":"b","function":{"name":"g","arguments":"{}"}}]}}]}'
    )
    assert assemble(text, calls, STOP, DONE).provider_state_json == (
        rb'{"extra_content":{"google": {"signature":"a\u002f", "n":1e2}},"tool_calls":['
        rb'{"thought_signature":"s1","extra_content":{"x": 1.0},"function":{"note":[ 1]}},{}]}'
    )


def test_unknown_fields_may_arrive_in_parts() -> None:
    """Lists and strings are extended, objects merged, duplicates dropped and empty values ignored."""
    chunks = [
        {"choices": [{"delta": {"seal": "abc", "more": {"a": {"b": 1}}, "audio": None, "annotations": []}}]},
        {"choices": [{"delta": {"seal": "abc", "more": {"a": {"c": "x"}}, "parts": [1]}}]},
        {"choices": [{"delta": {"seal": "def", "more": {"a": {"c": "y"}}, "parts": [1, 2]}}]},
    ]
    kept = json.loads(assemble(*chunks, delta(content="Hi"), STOP, DONE).provider_state_json)
    assert kept == {"seal": "abcdef", "more": {"a": {"b": 1, "c": "xy"}}, "parts": [1, 1, 2]}


def test_unknown_fields_are_limited_in_size() -> None:
    chunk = delta(tool_calls=[{**call(0, "a", "f", ""), "blob": ["x" * 100_000]}])
    answer = assemble(*[chunk] * 5, STOP, DONE)
    assert (len(answer.provider_state_json) > 500_000, answer.fields_left_out) == (True, False)
    answer = assemble(*[chunk] * 6, STOP, DONE)
    assert (answer.provider_state_json, answer.fields_left_out) == (b"", True)


def test_calls_are_ordered_by_index() -> None:
    second = delta(tool_calls=[{**call(1, "b", "second", "{}"), "seal": "2"}])
    answer = assemble(second, delta(tool_calls=[{**call(0, "a", "first", "{}"), "seal": "1"}]), STOP, DONE)
    assert [one.name for one in answer.calls] == ["first", "second"]
    assert answer.provider_state_json == b'{"tool_calls":[{"seal":"1"},{"seal":"2"}]}'


def test_a_stream_cut_inside_a_chunk_is_truncated_not_garbled() -> None:
    data = event(delta(content="Hi")) + event(delta(content="there"))[:-20]
    with pytest.raises(ModelError) as caught:
        feed(data)
    assert caught.value.problem.reason == "STREAM_TRUNCATED"


@pytest.mark.parametrize("fault", [event({"error": "overloaded"}), event(b"{garbage")])
def test_pieces_before_a_fault_in_the_same_bytes_are_returned(fault: bytes) -> None:
    pieces = Answer().feed(event(delta(content="Hi")) + fault)
    assert next(pieces) == TextPiece(text="Hi")
    with pytest.raises(ModelError):
        next(pieces)


def test_an_endless_answer_is_refused_and_not_retried() -> None:
    answer = Answer()
    chunk = event(delta(content="x" * 100_000))
    with pytest.raises(ModelError) as caught:
        for _ in range(ANSWER_BYTES_MAX // len(chunk) + 1):
            list(answer.feed(chunk))
    assert (caught.value.problem.reason, caught.value.problem.retryable) == ("STREAM_TOO_LARGE", False)


MIXTURE = b"".join(
    event(chunk)
    for chunk in [
        delta(reasoning="Let me sé"),
        delta(content="I will ", tool_calls=[call(0, "a", "add", "")]),
        delta(tool_calls=[call(0, None, None, '{"x":'), call(1, "b", "mul", "")]),
        delta(tool_calls=[call(1, None, None, "{}"), call(0, None, None, "1}")]),
        delta(content="do that 🦜."),
        delta("tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
        DONE,
    ]
)


@given(st.lists(st.integers(min_value=0, max_value=len(MIXTURE)), max_size=30))
def test_chunk_boundaries_do_not_change_the_pieces(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(MIXTURE)]
    assert feed(*(MIXTURE[start:end] for start, end in itertools.pairwise(bounds))) == feed(MIXTURE)


_VALUES: Any = st.sampled_from(
    [None, "", "a", "\0", "\uffff", "\uffffd83d", "\ud83d", 0, 1, {}, {"text": "b"}, [], ["c"], True]
)
_DELTAS: Any = st.dictionaries(
    st.sampled_from(["role", "content", "refusal", "reasoning", "reasoning_content", "tool_calls", "other"]), _VALUES
)
_CHOICES: Any = st.fixed_dictionaries(
    {"delta": st.one_of(_DELTAS, st.none())},
    optional=dict.fromkeys(("index", "finish_reason", "usage", "logprobs"), _VALUES),
)
_CHUNKS: Any = st.fixed_dictionaries(
    {"choices": st.lists(_CHOICES, min_size=0, max_size=2)},
    optional=dict.fromkeys(("object", "usage", "error", "type", "id"), _VALUES),
)


@given(_CHUNKS)
def test_the_fast_path_for_text_gives_the_same_pieces(content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()

    def read() -> object:
        try:
            return parser.pieces(data)
        except ModelError as error:
            return error.problem

    with mock.patch.object(parser, "_only_text", return_value=None):
        expected = read()
    assert read() == expected


@given(st.lists(st.sampled_from(["text", "reasoning", "usage"]), max_size=12))
def test_texts_that_arrive_together_become_one_piece(kinds: list[str]) -> None:
    chunks = {
        "text": {"choices": [{"delta": {"content": "a"}}]},
        "reasoning": {"choices": [{"delta": {"reasoning": "b"}}]},
        "usage": {"choices": [], "usage": {"prompt_tokens": 1}},
    }
    events = [b"data: %s\n\n" % json.dumps(chunks[kind]).encode() for kind in kinds]
    apart, together = Answer(), Answer()
    single = [piece for event in events for piece in apart.feed(event)]
    joined = list(together.feed(b"".join(events)))
    expected = [
        [TextPiece(text="".join(each.text for each in group if isinstance(each, TextPiece)))]
        if is_text
        else list(group)
        for is_text, group in itertools.groupby(single, key=lambda each: isinstance(each, TextPiece))
    ]
    assert joined == list(itertools.chain.from_iterable(expected))
