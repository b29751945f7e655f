from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.strict_json import JsonValue, dumps_canonical, loads
from pawl.errors import InvalidJson, TooLarge
from tests.tables import not_explained, not_refused

LIMIT = 100_000

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=30)


def same(left: JsonValue, right: JsonValue) -> bool:
    """Equality that tells 1 from 1.0 and True, and 0.0 from -0.0."""
    return repr(left) == repr(right) if not isinstance(left, dict | list) else _same_container(left, right)


def _same_container(left: JsonValue, right: JsonValue) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(same(one, other) for one, other in zip(left, right, strict=True))
    return False


@given(values)
def test_what_is_written_reads_back_the_same(value: JsonValue) -> None:
    assert same(loads(dumps_canonical(value), bytes_max=LIMIT), value)


@given(values)
def test_the_canonical_text_does_not_depend_on_how_the_value_was_written(value: JsonValue) -> None:
    loosely = json.dumps(value, indent=3, ensure_ascii=True).encode()
    assert dumps_canonical(loads(loosely, bytes_max=LIMIT)) == dumps_canonical(value)
    if isinstance(value, dict):
        assert dumps_canonical(dict(reversed(value.items()))) == dumps_canonical(value), "nor on the order of keys"


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_invalid_and_never_another_error(data: bytes) -> None:
    try:
        value = loads(data, bytes_max=LIMIT)
    except InvalidJson:
        return
    assert same(json.loads(data), value)


@given(st.lists(st.tuples(texts, values), min_size=1, max_size=4), st.integers(0, 3))
def test_a_duplicate_key_is_found_wherever_it_stands(members: list[tuple[str, JsonValue]], at: int) -> None:
    members.insert(at, (members[-1][0], ":"))
    text = "{" + ",".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in members) + "}"
    with pytest.raises(InvalidJson, match="same key twice"):
        loads(f'{{"outer": [{text}]}}'.encode(), bytes_max=LIMIT)


ODD: list[tuple[bytes, str]] = [
    (b"", "truncated"),
    (b"NaN", "byte 0"),
    (b"[Infinity]", "byte 1"),
    (b"-Infinity", "byte"),
    (b"1e400", "range of a double"),
    (b'{"a":1,"a":1}', "same key twice"),
    (b'{"a":1,"\\u0061":2}', "same key twice"),
    (b'{"a":":","a":":"}', "same key twice"),
    (b'"a\\u0000b"', "NUL"),
    (b'{"\\u0000":1}', "NUL"),
    (b'"\\ud800"', "truncated"),
    (b'"\\udc00x"', "surrogate"),
    (b'"\xed\xa0\x80"', "UTF-8"),
    (b'"\xff"', "UTF-8"),
    (b"18446744073709551616", "64 bits"),
    (b"[-9223372036854775809]", "64 bits"),
    (b"1 2", "trailing characters"),
    (b"{} x", "trailing characters"),
    (b"[" * 33 + b"]" * 33, "deeper than 32"),
    (b'{"a":' * 33 + b"1" + b"}" * 33, "deeper than 32"),
    (b"[" * 20_000, "deeper than 32"),
    (b"01", "byte"),
    (b"[1,]", "byte"),
    (b"'a'", "byte"),
    (b"\xef\xbb\xbf1", "byte 0"),
]


def test_what_parsers_disagree_about_is_refused() -> None:
    """C14: malformed arguments are never silently turned into something else."""
    assert not_explained(InvalidJson, lambda data: loads(data, bytes_max=LIMIT), ODD) == []
    with pytest.raises(TooLarge, match="limit of 3"):
        loads(b"NaN!", bytes_max=3)


def test_strict_json_is_accepted_and_numbers_keep_their_kind() -> None:
    rows: list[tuple[bytes, JsonValue]] = [
        (b" [1, 1.0, 1e2] \n", [1, 1.0, 100.0]),
        (b"18446744073709551615", 2**64 - 1),
        (b"-9223372036854775808", -(2**63)),
        (b'"\\ud83d\\ude00 \\\\u0000 :"', "😀 \\u0000 :"),
        (b'{"a":"x:y","b":{"c":":"}}', {"a": "x:y", "b": {"c": ":"}}),
    ]
    assert [data for data, value in rows if not same(loads(data, bytes_max=LIMIT), value)] == []
    assert loads(b"[" * 32 + b"]" * 32, bytes_max=LIMIT)
    assert dumps_canonical([1, 1.0, -0.0, 1e22, 2**64 - 1]) == b"[1,1.0,-0.0,1e22,18446744073709551615]"
    assert dumps_canonical({"é\u2028/": '"\\\n'}) == '{"é\u2028/":"\\"\\\\\\n"}'.encode(), (
        "no escapes but those of JSON"
    )


def test_what_could_not_be_read_back_is_not_written() -> None:
    deep: JsonValue = json.loads("[" * 33 + "]" * 33)
    rows: list[Any] = [
        math.nan,
        [math.inf],
        {"a": 2**64},
        "\0",
        "\ud800",
        {1: "a"},
        (1, 2),
        {"a": object()},
        b"x",
        deep,
    ]
    assert not_refused(InvalidJson, dumps_canonical, rows) == []
