"""Streamed text is broken between words, however it is cut into pieces."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from pawl.cli.transcript import Transcript
from pawl.cli.wrapping import WordWrap
from pawl.event.v1 import event_pb2


def wrapped(*pieces: str, width: int = 10) -> str:
    wrap = WordWrap(width)
    return "".join([*map(wrap.take, pieces), wrap.flush()])


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (("one two three",), ["one two", "three"]),
        (("one tw", "o th", "ree"), ["one two", "three"]),
        (("exactly 10", " more"), ["exactly 10", "more"]),
        (("a\n  indented", " b"), ["a", "  indented", "b"]),
        (("one\n\ntwo",), ["one", "", "two"]),
        (("日本 語の文章 x",), ["日本", "語の文章 x"]),
    ],
)
def test_no_word_crosses_the_edge(pieces: tuple[str, ...], lines: list[str]) -> None:
    assert wrapped(*pieces).split("\n") == lines


def test_a_word_is_kept_back_until_it_is_whole_and_a_long_one_is_not() -> None:
    wrap = WordWrap(80)
    assert wrap.take("one tw") == "one"
    assert wrap.take("o ") == " two"
    assert wrap.take("x" * 40) == " " + "x" * 40
    assert wrap.flush() == ""


@given(st.lists(st.text(alphabet="ab \n日", max_size=12), max_size=8), st.integers(4, 30))
def test_nothing_is_lost_and_lines_fit(pieces: list[str], width: int) -> None:
    """Only blanks before a break are dropped, and only a word that is too long for a line makes one too long."""
    text, shown = "".join(pieces), wrapped(*pieces, width=width)
    assert shown.split() == text.split() or max(map(cell_len, text.split())) >= 30
    assert "".join(shown.split()) == "".join(text.split())
    for line in shown.split("\n"):
        first = line[: len(line) - len(line.lstrip())] + "".join(line.split()[:1])
        assert cell_len(line) <= width or cell_len(first) > width


def test_a_transcript_wraps_words_on_a_terminal_and_leaves_other_output_whole() -> None:
    words = "It is the east and Juliet is the sun"

    def shown(*, terminal: bool) -> str:
        output = io.StringIO()
        console = Console(file=output, force_terminal=terminal, width=20, color_system=None)
        transcript = Transcript(console)
        for start in range(0, len(words), 3):
            delta = event_pb2.OutputDelta(text=words[start : start + 3])
            transcript.show(event_pb2.RunEvent(output_delta=delta))
        transcript.line(words)
        transcript.command(f"pawl {words}")
        return "\n".join(line.rstrip() for line in output.getvalue().split("\n"))

    broken = "It is the east and\nJuliet is the sun\n"
    assert shown(terminal=True) == f"{broken}{broken}  pawl {words}\n"
    assert shown(terminal=False) == f"{words}\n{words}\n  pawl {words}\n"
