"""Few events, nothing lost (EVT-2, D3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.agent_loop.domain.coalesce import OUTPUT_CHARACTERS_MAX, Coalescer
from pawl.agent_loop.domain.event import CallFragment, OutputDelta
from pawl.agent_loop.domain.model import (
    CallPiece,
    Piece,
    ReasoningPiece,
    RefusalPiece,
    TextPiece,
)

HEAD = OutputDelta(round=1, model_attempt=1)


def play(pieces: list[tuple[float, Piece]]) -> list[OutputDelta]:
    """Give pieces at their times, taking output as soon as it is due, and the rest at the end."""
    coalescer = Coalescer(HEAD)
    outputs: list[OutputDelta] = []
    for now, piece in pieces:
        while (due := coalescer.due_at()) is not None and due <= now:
            outputs += coalescer.take(due)
        coalescer.add(piece)
        if (due := coalescer.due_at()) is not None and due <= now:
            outputs += coalescer.take(now)
    return outputs + list(coalescer.take(pieces[-1][0] if pieces else 0.0))


def test_100_pieces_at_once_give_at_most_11_outputs() -> None:
    outputs = play([(5.0, TextPiece(text="x")) for _ in range(100)])
    assert len(outputs) <= 11
    assert "".join(output.text for output in outputs) == "x" * 100


def test_the_first_piece_is_due_at_once() -> None:
    coalescer = Coalescer(HEAD)
    coalescer.add(TextPiece(text="H"))
    assert coalescer.due_at() == 0.0
    assert coalescer.take(7.0) == (replace(HEAD, text="H"),)
    coalescer.add(TextPiece(text="i"))
    assert coalescer.due_at() == pytest.approx(7.1)


def test_pieces_of_one_kind_are_joined_and_calls_stand_in_the_order_they_were_written() -> None:
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
    for piece in pieces:
        coalescer.add(piece)
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


def test_an_output_is_never_too_large_for_a_watcher() -> None:
    coalescer = Coalescer(HEAD)
    coalescer.add(TextPiece(text="x" * (2 * OUTPUT_CHARACTERS_MAX + 5)))
    coalescer.add(CallPiece(index=0, name="f", arguments="y" * OUTPUT_CHARACTERS_MAX))
    outputs = coalescer.take(0.0)
    sizes = [len(each.text) + sum(len(call.arguments_text) for call in each.calls) for each in outputs]
    assert max(sizes) <= OUTPUT_CHARACTERS_MAX
    assert sum(sizes) == 3 * OUTPUT_CHARACTERS_MAX + 5


PIECES = st.one_of(
    st.text(max_size=5).map(lambda text: TextPiece(text=text)),
    st.text(max_size=5).map(lambda text: ReasoningPiece(text=text)),
    st.builds(CallPiece, index=st.integers(0, 2), arguments=st.text(max_size=5)),
)


@given(st.lists(st.tuples(st.floats(0, 0.3), PIECES), max_size=60))
def test_nothing_is_lost_or_turned_around(steps: list[tuple[float, Piece]]) -> None:
    now = 0.0
    pieces: list[tuple[float, Piece]] = []
    for wait, piece in steps:
        now += wait
        pieces.append((now, piece))
    outputs = play(pieces)
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
