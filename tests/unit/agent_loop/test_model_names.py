"""Tools named `<source>.<tool>`, on the wire to a model server and back."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.agent_loop.adapters.model.names import Names, names_of, renamed
from pawl.agent_loop.domain import text
from pawl.agent_loop.domain.model import CallPiece, Finished, ModelRequest, Piece, TextPiece

ALLOWED = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
PART = st.text("ab_-.", min_size=1, max_size=62)


def a_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


def a_request(*offered: str, **more: Any) -> ModelRequest:
    return ModelRequest(**{"model": "m", "messages": (), "tools": tuple(map(a_tool, offered))} | more)


def back(names: Names, *pieces: Piece) -> list[Piece]:
    return [given for piece in pieces for given in names.inward(piece)] + list(names.last([]))


def test_a_tool_that_has_the_name_already_keeps_it_and_the_other_gets_a_digest() -> None:
    names = Names(["a.b", "a__b"])
    other = names.outward("a.b")
    assert names.outward("a__b") == "a__b" != other
    assert back(names, CallPiece(index=0, name="a__b")) == [CallPiece(index=0, name="a__b")]
    assert back(names, CallPiece(index=0, name=other)) == [CallPiece(index=0, name="a.b")]


@given(st.sets(st.from_regex(r"[ab_-]{1,64}|(?=.{3,63}\Z)[ab_-]+\.[ab_-]+", fullmatch=True), max_size=12))
def test_every_set_of_tools_has_names_that_are_allowed_distinct_and_come_back(offered: set[str]) -> None:
    names = Names(offered)
    outward = {name: names.outward(name) for name in offered}
    assert all(map(ALLOWED.fullmatch, outward.values()))
    assert len(set(outward.values())) == len(offered)
    for name, form in outward.items():
        assert back(names, CallPiece(index=0, name=form)) == [CallPiece(index=0, name=name)]


@given(PART)
def test_whatever_the_history_holds_goes_out_as_an_allowed_name(name: str) -> None:
    assert ALLOWED.fullmatch(Names([]).outward(name) if "." in name else text.tool_name(name))


@pytest.mark.parametrize("cut", range(1, len("time__now")))
def test_a_name_that_comes_in_parts_comes_back_whole(cut: int) -> None:
    names = Names(["time.now"])
    pieces: list[Piece] = [
        CallPiece(index=0, call_id="c", name="time__now"[:cut]),
        CallPiece(index=0, name="time__now"[cut:]),
        CallPiece(index=0, arguments="{}"),
        Finished(reason="tool_calls"),
    ]
    assert back(names, *pieces) == [CallPiece(index=0, call_id="c", name="time.now"), *pieces[2:]]


def test_the_beginning_of_a_name_is_not_lost_when_nothing_follows() -> None:
    names = Names(["time.now"])
    assert back(names, CallPiece(index=0, name="time"), TextPiece(text="x")) == [
        CallPiece(index=0, name="time"),
        TextPiece(text="x"),
    ]
    assert back(names, CallPiece(index=0, name="time")) == [CallPiece(index=0, name="time")]


def test_tools_history_and_choice_are_renamed_together() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "a.b", "arguments": "{}"}}
    request = a_request(
        "a.b", messages=({"role": "assistant", "content": None, "tool_calls": [call]},), tool_choice=a_tool("a.b")
    )
    names = names_of(request)
    assert names is not None
    out = renamed(request, names)
    assert isinstance(out.tool_choice, dict)
    assert [out.tools[0]["function"]["name"], out.messages[0]["tool_calls"][0]["function"]["name"]] == ["a__b", "a__b"]
    assert out.tool_choice["function"]["name"] == "a__b"
    assert request.tools[0]["function"]["name"] == "a.b", "what is shared is not changed"


def test_a_name_with_one_dot_is_kept_and_any_other_is_made_harmless() -> None:
    assert text.tool_name(" time.now ") == "time.now"
    assert text.tool_name("a.b.c") == "a_b_c"
    assert text.tool_name("x" * 62 + ".y") == "x" * 62 + "_y"
