"""Expressions in CEL over results: they come to true or false, or are refused; none of them costs much or gets far."""

from __future__ import annotations

import contextlib
import resource
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.agent_loop.domain import expression
from pawl.agent_loop.domain.expression import ExpressionError

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
_WORDS = (
    "value previous fired . [ ] ( ) { } : , ? ! == != < + - * / % in && || 1 2.5 'a' null true size has all exists "
    "map filter x has( exists(x, matches timestamp google.protobuf.Value{}"
)
_TOKENS = st.lists(st.sampled_from(_WORDS.split(" ")), max_size=14)


def evaluated(source: str, value: Any = None, previous: Any = None, fired: int = 0) -> bool:
    expression.check(source)
    return expression.evaluate(source, value=value, previous=previous, fired=fired)


@pytest.mark.parametrize(
    ("source", "value", "previous", "outcome"),
    [
        ("value.price < 20", {"price": 19.5}, None, True),
        ("value.price < 20", {"price": 20}, None, False),
        ("previous == null || value - previous > 1.5", 10, None, True),
        ("previous == null || value - previous > 1.5", 10, 9.5, False),
        ("value.items.exists(i, !(i in previous.items))", {"items": [1, 2]}, {"items": [2]}, True),
        ("value.all(i, i.ok)", [{"ok": True}, {"ok": False}], None, False),
        ("has(value.error) && value.error.contains('time')", {"error": "timeout"}, None, True),
        ("timestamp(value) > timestamp('2025-01-01T00:00:00Z')", "2026-01-01T00:00:00Z", None, True),
        ("value[0] == 9007199254740993", [9007199254740993], None, True),
        ("fired < 3", None, None, True),
    ],
)
def test_an_expression_is_true_or_false(source: str, value: Any, previous: Any, outcome: bool) -> None:
    assert evaluated(source, value, previous) is outcome


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("value.price <", "column 14: Syntax error"),
        ("value.price < limit", "column 15: undeclared reference to 'limit'"),
        ("fired + 'a' == 3", "column 7: found no matching overload"),
        ("'cheap'", "of type string"),
        ("", "1 to 256 characters"),
        ("value == " + "1" * 250, "1 to 256 characters"),
        ("value <\n20", "one line"),
        ("\ud800 == value", "one line"),
        ("(" * 100 + "true" + ")" * 100, "recursion limit"),
        ("value.all(x, value.all(y, true))", "one of all, exists and exists_one"),
        ("value.map(x, [x, x]).all(y, true)", "undeclared reference"),
        ("value.filter(x, true) == []", "undeclared reference"),
        ("value.matches('(a+)+$')", "undeclared reference to 'matches'"),
        ("timestamp(value).getHours('/etc/passwd') > 1", "undeclared reference to 'getHours'"),
        ("cel.bind(x, value, x == 1)", "undeclared reference"),
    ],
)
def test_what_may_not_be_evaluated_is_refused_with_its_place(source: str, hint: str) -> None:
    with pytest.raises(ExpressionError) as refused:
        expression.check(source)
    assert hint in str(refused.value)


@pytest.mark.parametrize(
    ("source", "value", "hint"),
    [
        ("value.price < 20", {}, "Key not found"),
        ("value.price < 20", {"price": "a"}, "No matching overloads"),
        ("value", 3, "neither true nor false"),
        ("1 / 0 == 1", None, "divide by zero"),
        ("size(value) > 1", "x" * 70_000, "give a path"),
    ],
)
def test_what_comes_to_nothing_is_an_error(source: str, value: Any, hint: str) -> None:
    with pytest.raises(ExpressionError) as error:
        evaluated(source, value)
    assert hint in str(error.value)


_NUMBERS = list(range(12_000))
_ROWS = [{"name": f"n{number}", "price": number} for number in range(1500)]


@pytest.mark.parametrize(
    ("source", "value", "previous"),
    [
        ("value.all(x, value == previous || x == 0)", _NUMBERS[:9000], _NUMBERS[:9000]),
        ("value.all(x, x in value && x in value)", _NUMBERS, None),
        ("value.all(x, value == value)", _ROWS, None),
        ("value.all(x, " + " && ".join(["x == x"] * 25) + ")", _NUMBERS[:9999], None),
        ("[" + "1," * 60 + "1].all(x, !(x == value) && !(value == x))", _NUMBERS[:9000], None),
        ("[" + ",".join(["value"] * 25) + "].all(x, x == x && x == x && x == x)", _NUMBERS, None),
        ("[" + "1," * 60 + "1].all(x, size(string(x) + value + string(x)) > 0)", "y" * 65_000, None),
        ("size(" + "+".join(["value"] * 25) + ") > 0", "y" * 65_000, None),
        (" && ".join(["value == previous"] * 12), _NUMBERS, _NUMBERS),
        ("value.exists(x, x.name.contains('zzz'))", _ROWS, None),
    ],
)
def test_a_bomb_stops_nothing(source: str, value: Any, previous: Any) -> None:
    """It is refused, or its cost is bounded: in the time of the processor, whatever else the machine does."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    with contextlib.suppress(ExpressionError):
        evaluated(source, value, previous)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 1.0
    assert after.ru_maxrss - before.ru_maxrss < 100_000


@given(_TOKENS, _JSON, _JSON)
def test_whatever_is_written_comes_to_true_or_false_or_an_error_and_to_the_same_again(
    tokens: list[str], value: Any, previous: Any
) -> None:
    source = " ".join(tokens)
    outcomes = []
    for _ in range(2):
        try:
            outcomes.append(str(evaluated(source, value, previous)))
        except ExpressionError as error:
            outcomes.append(f"{error}")
    assert outcomes[0] == outcomes[1]
