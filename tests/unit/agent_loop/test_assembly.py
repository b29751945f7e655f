"""Which fragments make up one call, for all the ways in which servers number them (LOOP-2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.agent_loop.domain.assembly import Assembly, RawCall
from pawl.agent_loop.domain.model import CallPiece, Finished, Piece, ReasoningPiece, RefusalPiece, TextPiece


def piece(index: int | None = None, call_id: str = "", name: str = "", arguments: str = "") -> CallPiece:
    return CallPiece(index=index, call_id=call_id, name=name, arguments=arguments)


def calls(*pieces: CallPiece) -> list[tuple[str, str, str]]:
    assembly = Assembly()
    for each in pieces:
        assembly.add(each)
    return [(call.provider_call_id, call.name, call.arguments) for call in assembly.answer().calls]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param(
            [piece(0, "a", "f"), piece(0, arguments='{"x"'), piece(0, arguments=":1}")],
            [("a", "f", '{"x":1}')],
            id="as the protocol says",
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
            id="an id made up for each fragment",
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
        pytest.param([piece(arguments="{}")], [("", "", "{}")], id="arguments out of nowhere"),
    ],
)
def test_fragments_find_their_call(pieces: list[CallPiece], expected: list[tuple[str, str, str]]) -> None:
    assert calls(*pieces) == expected


def test_watchers_see_the_position_and_the_name_of_a_call_with_each_fragment() -> None:
    assembly = Assembly()
    assembly.add(piece(3, "a", "f"))
    assembly.add(piece(5, "b", "g"))
    assert assembly.add(piece(3, arguments="{}")) == piece(0, "a", "f", "{}")
    assert assembly.add(piece(5, arguments="[]")) == piece(1, "b", "g", "[]")


def test_text_reasoning_and_refusal_are_joined_in_order() -> None:
    assembly = Assembly()
    pieces: list[Piece] = [ReasoningPiece(text="a"), TextPiece(text="1"), ReasoningPiece(text="b"), TextPiece(text="2")]
    for each in pieces:
        assembly.add(each)
    assembly.add(RefusalPiece(text="no"))
    assembly.add(Finished(reason="stop"))
    answer = assembly.answer()
    assert (answer.text, answer.reasoning, answer.refusal, answer.finish_reason) == ("12", "ab", "no", "stop")


@given(st.data())
def test_calls_written_as_the_protocol_says_are_whole_however_they_interleave(data: st.DataObject) -> None:
    arguments = data.draw(st.lists(st.text(alphabet='{}":a1', min_size=1, max_size=8), min_size=1, max_size=4))
    queues = [
        [piece(index, f"id{index}", f"f{index}"), *(piece(index, arguments=letter) for letter in text)]
        for index, text in enumerate(arguments)
    ]
    written = []
    for index in range(len(queues)):
        written.append(queues[index].pop(0))
        while data.draw(st.booleans()) and any(queues[: index + 1]):
            queue = data.draw(st.sampled_from([queue for queue in queues[: index + 1] if queue]))
            written.append(queue.pop(0))
    written += [each for queue in queues for each in queue]
    assembly = Assembly()
    for each in written:
        assembly.add(each)
    assert assembly.answer().calls == tuple(
        RawCall(provider_call_id=f"id{index}", name=f"f{index}", arguments=text) for index, text in enumerate(arguments)
    )
