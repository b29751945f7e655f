"""Event streams, coalesced output, fragments of calls, and tool names that a model server accepts."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import text
from pawl.agent_loop.loop.rules.assembly import Assembly
from pawl.agent_loop.loop.rules.coalesce import HELD_SECONDS_MAX, OUTPUT_CHARACTERS_MAX, Coalescer
from pawl.agent_loop.loop.rules.fact import CallFragment, OutputDelta
from pawl.agent_loop.model.names import Names, names_of, renamed
from pawl.agent_loop.model.request import (
    CallPiece,
    ModelRequest,
    Piece,
    ReasoningPiece,
    RefusalPiece,
    TextPiece,
)
from pawl.agent_loop.model.sse import EVENT_BYTES_MAX, EventTooLargeError, SseDecoder
from tests.tables import for_each

LINES = st.sampled_from(
    [b"data: one", b"data:two", b"data:  three", b"data", b": a comment", b":", b"event: x", b"id: 7", b"", b"", b"x"]
)
STREAMS = st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=12).map(
    lambda lines: b"".join(line + end for line, end in lines)
)


def decode(*chunks: bytes) -> list[bytes]:
    decoder = SseDecoder()
    events = [event for chunk in chunks for event in decoder.feed(chunk)]
    rest = decoder.flush()
    return events + ([rest] if rest is not None else [])


@for_each(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b": life sign\n\ndata: a\n\n: life sign\n\n", [b"a"]),
        (b"event: error\ndata: a\nid: 3\nretry: 5\n\n", [b"a"]),
        (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
        (b"data: a\n\ndata: unfinished", [b"a", b"unfinished"]),
        (b"\n\n\n", []),
        (b"", []),
    ],
)
def test_events_are_parsed_according_to_the_standard(stream: bytes, events: Any) -> None:
    assert decode(stream) == events


@given(STREAMS, st.lists(st.integers(min_value=0, max_value=200), max_size=20))
def test_chunk_boundaries_do_not_change_the_events(stream: bytes, cuts: list[int]) -> None:
    """LOOP-2: even single bytes give the same events."""
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[start:end] for start, end in itertools.pairwise(bounds)]
    assert decode(*chunks) == decode(stream) == decode(*(bytes([byte]) for byte in stream))


def test_an_event_is_returned_before_the_next_one_starts() -> None:
    decoder = SseDecoder()
    assert (decoder.feed(b"data: a\r\n\r"), decoder.feed(b"\ndata: b")) == ([b"a"], [])
    assert decoder.feed(b"\n\n") == [b"b"]


@pytest.mark.parametrize("part", [b"x" * 65536, b"data: " + b"x" * 65536 + b"\n"])
def test_an_endless_line_or_event_is_refused(part: bytes) -> None:
    decoder = SseDecoder()
    with pytest.raises(EventTooLargeError):
        for _ in range(EVENT_BYTES_MAX // 65536 + 2):
            decoder.feed(part)


# Few output events, nothing lost (EVT-2, D3).


HEAD = OutputDelta(round=1, model_attempt=1)


# How late an output's timer is, and how long its commit takes.
Delay = tuple[float, float]


def play(pieces: Sequence[tuple[float, Piece]], delays: Iterable[Delay] = ()) -> list[OutputDelta]:
    """Return the outputs for `pieces`, each with its arrival time. `delays` apply to the first outputs.

    Fails if a piece is due later than 1 s after its arrival.
    """
    coalescer, coming, held, outputs = Coalescer(HEAD), deque(pieces), list[float](), list[OutputDelta]()
    free_at, more = 0.0, itertools.chain(delays, itertools.repeat((0.0, 0.0)))

    def arrive() -> None:
        at, piece = coming.popleft()
        coalescer.add(piece, at)
        held.append(at)

    while coming or held:
        due = coalescer.due_at()
        if due is None or (coming and coming[0][0] < max(due, free_at)):
            arrive()
            continue
        assert due <= held[0] + HELD_SECONDS_MAX
        late, commit = next(more)
        taken_at = max(due, free_at) + late
        while coming and coming[0][0] < taken_at:
            arrive()
        outputs += coalescer.take(taken_at)
        held.clear()
        free_at = taken_at + commit
        while coming and coming[0][0] < free_at:
            arrive()
        coalescer.shown(free_at)
    return outputs


def paced(count: int, seconds: float) -> list[tuple[float, Piece]]:
    return [(5.0 + number * seconds, TextPiece(text=f"{number} ")) for number in range(count)]


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 2), (0.002, 3), (0.02, 21)])
def test_an_idle_machine_shows_output_every_100_ms(seconds: float, most: int) -> None:
    outputs = play(paced(100, seconds), itertools.repeat((0.001, 0.004)))
    assert most - 2 <= len(outputs) <= most
    assert "".join(output.text for output in outputs) == "".join(f"{number} " for number in range(100))


@pytest.mark.parametrize("seconds", [0.2, 0.5, 2.0])
def test_pieces_are_not_delayed_when_the_model_pauses(seconds: float) -> None:
    coalescer = Coalescer(HEAD)
    for at, piece in paced(10, seconds):
        coalescer.add(piece, at)
        assert coalescer.due_at() == at
        coalescer.take(at + 0.001)
        coalescer.shown(at + 0.005)


def test_the_first_piece_is_due_immediately_and_the_next_after_a_pause() -> None:
    coalescer = Coalescer(HEAD)
    coalescer.add(TextPiece(text="H"), 6.0)
    assert (coalescer.due_at(), coalescer.take(7.0)) == (6.0, (replace(HEAD, text="H"),))
    coalescer.add(TextPiece(text="i"), 7.02)
    coalescer.shown(7.05)
    assert coalescer.due_at() == pytest.approx(8.02), "1 s after its arrival, before the end of the pause"
    coalescer.take(8.02)
    coalescer.shown(8.04)
    coalescer.add(TextPiece(text="!"), 8.05)
    assert coalescer.due_at() == pytest.approx(8.24), "ten times the delay after the output before it"


def test_a_pause_that_the_ledger_requests_delays_output_but_not_the_rest_of_a_complete_answer() -> None:
    coalescer = Coalescer(HEAD)
    coalescer.add(TextPiece(text="H"), 6.0)
    coalescer.take(6.0)
    coalescer.shown(6.0, 30.0)
    coalescer.add(TextPiece(text="i"), 6.1)
    assert coalescer.due_at() == 36.0
    coalescer.take(36.0)
    coalescer.shown(36.0, 0.0)
    coalescer.add(TextPiece(text="!"), 36.05)
    assert coalescer.due_at() == pytest.approx(36.1)


@for_each("requests", [(), (0.0,), (40.0,), (0.5, None), (40.0, None, None), (None, 30.0, None), (30.0, None, 0.0)])
def test_a_requested_pause_holds_until_the_next_request(requests: tuple[float | None, ...]) -> None:
    """Steps without output request nothing, and can be committed while output is held or committed."""
    last = ([0.0, *(each for each in requests if each is not None)])[-1]
    for taken_after in range(len(requests) + 1):
        coalescer = Coalescer(HEAD)
        coalescer.add(TextPiece(text="H"), 6.0)
        for number, request in enumerate([*requests, None]):
            if number == taken_after:
                coalescer.take(6.0)
            coalescer.shown(6.0, request)
        coalescer.add(TextPiece(text="i"), 6.0)
        assert coalescer.due_at() == pytest.approx(6.0 + max(last, 0.1))
        coalescer.take(6.0 + last)
        coalescer.shown(6.2 + last)
        coalescer.add(TextPiece(text="!"), 6.2 + last)
        assert coalescer.due_at() == pytest.approx(6.2 + last + max(last, 1.0)), "the delay is also considered"


@for_each("is_shown", [False, True])
def test_the_rest_of_a_complete_answer_is_due_100_ms_after_its_end(is_shown: bool) -> None:
    """The step that commits the answer normally shows the rest earlier."""
    coalescer = Coalescer(HEAD)
    coalescer.add(TextPiece(text="H"), 6.0)
    if is_shown:
        coalescer.take(6.0)
        coalescer.shown(6.001)
        coalescer.add(TextPiece(text="i"), 6.09)
    coalescer.end(6.09)
    assert coalescer.due_at() == pytest.approx(6.19)


@given(st.floats(0.01, 0.09), st.floats(0, 0.04))
def test_output_commits_take_at_most_a_tenth_of_the_time(commit: float, pace: float) -> None:
    """Otherwise output would slow down its own commits."""
    pieces = paced(200, pace)
    assert (len(play(pieces, itertools.repeat((0.0, commit)))) - 2) * commit <= (pieces[-1][0] - pieces[0][0]) / 10


def test_pieces_of_one_kind_are_joined_and_calls_keep_their_order() -> None:
    coalescer = Coalescer(HEAD)
    pieces: list[Piece] = [
        ReasoningPiece(text="a"),
        TextPiece(text="1"),
        ReasoningPiece(text="b"),
        CallPiece(index=0, name="f", arguments="{"),
        CallPiece(index=0, name="f", arguments="}"),
        CallPiece(index=1, name="g", arguments="["),
        CallPiece(index=0, name="f", arguments=" "),
        TextPiece(text="2"),
        RefusalPiece(text="no"),
    ]
    assembly = Assembly()
    for piece in pieces:
        coalescer.add(piece, 0.0)
        assembly.add(piece)
    whole = assembly.answer()
    assert (whole.text, whole.reasoning, whole.refusal) == ("12", "ab", "no")
    assert coalescer.take(0.0) == (
        replace(
            HEAD,
            text="12",
            reasoning="ab",
            refusal="no",
            calls=(
                CallFragment(index=0, tool_name="f", arguments_text="{}"),
                CallFragment(index=1, tool_name="g", arguments_text="["),
                CallFragment(index=0, tool_name="f", arguments_text=" "),
            ),
        ),
    )


def test_an_output_never_exceeds_the_size_limit() -> None:
    coalescer = Coalescer(HEAD)
    coalescer.add(TextPiece(text="x" * (2 * OUTPUT_CHARACTERS_MAX + 5)), 0.0)
    coalescer.add(CallPiece(index=0, name="f", arguments="y" * OUTPUT_CHARACTERS_MAX), 0.0)
    outputs = coalescer.take(0.0)
    sizes = [len(each.text) + sum(len(call.arguments_text) for call in each.calls) for each in outputs]
    assert (max(sizes) <= OUTPUT_CHARACTERS_MAX, sum(sizes)) == (True, 3 * OUTPUT_CHARACTERS_MAX + 5)


STORABLE = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)
PIECES = st.one_of(
    STORABLE.map(lambda text: TextPiece(text=text)),
    STORABLE.map(lambda text: ReasoningPiece(text=text)),
    st.builds(CallPiece, index=st.integers(0, 2), arguments=STORABLE),
)


WAITS = st.one_of(st.just(0.0), st.floats(0, 0.3), st.floats(0, 3))


@given(
    st.lists(st.tuples(WAITS, PIECES), max_size=60),
    st.lists(st.tuples(WAITS, WAITS), max_size=20),
)
def test_delays_never_lose_reorder_or_multiply_output(steps: list[tuple[float, Piece]], delays: list[Delay]) -> None:
    times = itertools.accumulate(wait for wait, _ in steps)
    pieces = list(zip(times, (piece for _, piece in steps), strict=True))
    outputs = play(pieces, delays)
    assert len(outputs) <= len(play(pieces)), "delays only ever cause fewer outputs"
    assert "".join(output.text for output in outputs) == "".join(
        piece.text for _, piece in pieces if isinstance(piece, TextPiece)
    )
    assert "".join(output.reasoning for output in outputs) == "".join(
        piece.text for _, piece in pieces if isinstance(piece, ReasoningPiece)
    )
    for index in range(3):
        assert "".join(call.arguments_text for out in outputs for call in out.calls if call.index == index) == "".join(
            piece.arguments for _, piece in pieces if isinstance(piece, CallPiece) and piece.index == index
        )


# Which fragments make up one call, for all the ways in which servers number them (LOOP-2).


def piece(index: int | None = None, call_id: str = "", name: str = "", arguments: str = "") -> CallPiece:
    return CallPiece(index=index, call_id=call_id, name=name, arguments=arguments)


def calls(*pieces: CallPiece) -> list[tuple[str, str, str]]:
    assembly = Assembly()
    for each in pieces:
        assembly.add(each)
    return [(call.call_id, call.name, call.arguments) for call in assembly.answer().calls]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param(
            [piece(0, "a", "f"), piece(0, arguments='{"x"'), piece(0, arguments=":1}")],
            [("a", "f", '{"x":1}')],
            id="as specified",
        ),
        pytest.param(
            [piece(0, "a", "f"), piece(1, "b", "g"), piece(0, arguments="{}"), piece(1, arguments="[]")],
            [("a", "f", "{}"), ("b", "g", "[]")],
            id="interleaved",
        ),
        pytest.param(
            [piece(0, "a", "f", "{}"), piece(0, "b", "g", "[]")],
            [("a", "f", "{}"), ("b", "g", "[]")],
            id="one index for all, ids change",
        ),
        pytest.param(
            [piece(0, "a", "f"), piece(0, "b", "g"), piece(0, "a", arguments="1"), piece(0, "b", arguments="2")],
            [("a", "f", "1"), ("b", "g", "2")],
            id="one index for all, interleaved by id",
        ),
        pytest.param(
            [piece(None, "a", "f"), piece(None, arguments="{}"), piece(None, "b", "g"), piece(None, arguments="[]")],
            [("a", "f", "{}"), ("b", "g", "[]")],
            id="no index",
        ),
        pytest.param(
            [piece(None, "", "f", "{}"), piece(None, "", "g", "[]")],
            [("", "f", "{}"), ("", "g", "[]")],
            id="neither index nor id",
        ),
        pytest.param(
            [piece(None, "", "f"), piece(None, "", "f")],
            [("", "f", ""), ("", "f", "")],
            id="neither index nor id nor arguments",
        ),
        pytest.param(
            [piece(0, "", "f", '{"a":1}'), piece(0, "", "f", '{"a":2}')],
            [("", "f", '{"a":1}'), ("", "f", '{"a":2}')],
            id="one index, no ids, whole calls",
        ),
        pytest.param(
            [piece(0, "", "f", '{"a"'), piece(0, "", "f", ":1}")],
            [("", "f", '{"a":1}')],
            id="the name again in each fragment",
        ),
        pytest.param(
            [piece(0, "a", "f"), piece(0, "random-1", "", '{"a"'), piece(0, "random-2", "", ":1}")],
            [("a", "f", '{"a":1}')],
            id="a new id for each fragment",
        ),
        pytest.param(
            [piece(0, "", "f"), piece(0, "a", "", "{}")],
            [("a", "f", "{}")],
            id="the id comes late",
        ),
        pytest.param(
            [piece(0, "a", "get_"), piece(0, "", "time"), piece(0, arguments="{}")],
            [("a", "get_time", "{}")],
            id="the name in pieces",
        ),
        pytest.param(
            [piece(0, "a", "f", "{}"), piece(1, "a", "g", "[]")],
            [("a", "f", "{}"), ("a", "g", "[]")],
            id="one id for two indices",
        ),
        pytest.param([piece(7, "a", "f")], [("a", "f", "")], id="no arguments, odd index"),
        pytest.param([piece(arguments="{}")], [("", "", "{}")], id="arguments without a call"),
    ],
)
def test_fragments_are_assigned_to_their_call(pieces: list[CallPiece], expected: list[tuple[str, str, str]]) -> None:
    assert calls(*pieces) == expected


@pytest.mark.parametrize(
    ("fragments", "expected"),
    [
        (['{"a":', '{"a":1', '{"a":1}'], '{"a":1}'),
        (['{"a":1}', '{"a":1}'], '{"a":1}'),
        (["{}", '{"a":1}'], '{"a":1}'),
        (["{}", '{"a":', "1}"], '{"a":1}'),
        (["{}", '{"a":', '{"a":1}'], '{"a":1}'),
        (['{"a":1}', " I will", " now wait."], '{"a":1}'),
        (['{"a":1}}'], '{"a":1}'),
        (["{", '"a":', "1", "1", "}"], '{"a":11}'),
        (['"', "{}", "{}", '"'], '"{}{}"'),
        (['{"a":1}', '{"a":2}'], '{"a":1}{"a":2}'),
        (['{"a":1', '{"a":1'], '{"a":1{"a":1'),
        (["[1]", " yes"], "[1] yes"),
        (["{}", '"a":1}'], '{}"a":1}'),
        (["[" * 100_000], "[" * 100_000),
    ],
)
@for_each("again", [piece(0), piece(0, "a", "f")])
def test_argument_fragments_are_joined_into_one_object(fragments: list[str], expected: str, again: Any) -> None:
    """Servers resend whole arguments, start with `{}`, or add text after them."""
    pieces = [piece(0, "a", "f"), *(replace(again, arguments=fragment) for fragment in fragments)]
    assert calls(*pieces) == [("a", "f", expected)]


def test_each_fragment_has_the_position_and_name_of_its_call() -> None:
    assembly = Assembly()
    pieces = [piece(3, "a", "f"), piece(5, "b", "g"), piece(3, arguments="{}"), piece(5, arguments="[]")]
    assert list(map(assembly.add, pieces))[2:] == [piece(0, "a", "f", "{}"), piece(1, "b", "g", "[]")]


# Names of tools, `<source>.<tool>`, as sent to a model server and received back.


ALLOWED = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
PART = st.text("ab_-.", min_size=1, max_size=62)


def a_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


def a_request(*offered: str, **more: Any) -> ModelRequest:
    return ModelRequest(**{"model": "m", "messages": (), "tools": tuple(map(a_tool, offered))} | more)


def back(names: Names, form: str) -> str:
    return names.inward.get(form, form)


def test_a_colliding_tool_name_gets_a_digest() -> None:
    names = Names(["a.b", "a__b"])
    other = names.outward("a.b")
    assert (names.outward("a__b"), back(names, "a__b"), back(names, other)) == ("a__b", "a__b", "a.b")


SOME = st.text("ab_-", min_size=1, max_size=31)


@given(st.sets(SOME | st.tuples(SOME, SOME).map(".".join) | st.text("ab_-", min_size=60, max_size=64), max_size=6))
def test_wire_names_are_allowed_distinct_and_reversible(offered: set[str]) -> None:
    names = Names(offered)
    outward = {name: names.outward(name) for name in offered}
    assert all(map(ALLOWED.fullmatch, outward.values()))
    assert {back(names, form): form for form in set(outward.values())} == outward


@given(PART)
def test_every_name_in_the_history_is_sent_as_an_allowed_name(name: str) -> None:
    assert ALLOWED.fullmatch(Names([]).outward(name) if "." in name else text.tool_name(name))


def test_a_name_received_in_parts_is_reassembled() -> None:
    for cut in range(1, len("time__now")):
        assembly = Assembly(Names(["time.now"]).inward)
        assembly.add(piece(0, "c", "time__now"[:cut]))
        assert assembly.add(piece(0, name="time__now"[cut:])) == piece(0, "c", "time.now"), cut
        assert [call.name for call in assembly.answer().calls] == ["time.now"], cut


def test_tools_history_and_choice_are_renamed_together() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "a.b", "arguments": "{}"}}
    request = a_request(
        "a.b", messages=({"role": "assistant", "content": None, "tool_calls": [call]},), tool_choice=a_tool("a.b")
    )
    out = renamed(request, names_of(request))
    renamed_functions: list[Any] = [out.tools[0], out.messages[0]["tool_calls"][0], out.tool_choice]
    assert [each["function"]["name"] for each in renamed_functions] == ["a__b"] * 3
    assert request.tools[0]["function"]["name"] == "a.b", "shared values are unchanged"


def test_a_name_with_one_dot_is_kept_while_other_names_are_sanitised() -> None:
    names = {" time.now ": "time.now", "a.b.c": "a_b_c", "x" * 62 + ".y": "x" * 62 + "_y"}
    assert {name: text.tool_name(name) for name in names} == names
