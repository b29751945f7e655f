"""Ids, labels, JSON, errors, untrusted text, and fair sharing of slots."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.ids import (
    IdSource,
    StoreId,
    UserId,
    check_id,
    is_id,
)
from pawl.chassis.labels import LABELS_MAX, check_labels, has_all
from pawl.chassis.rpc.parts import in_parts
from pawl.chassis.strict_json import JsonValue, dumps_canonical, loads
from pawl.chassis.visible import shortened, visible
from pawl.errors import InvalidField, InvalidId, InvalidJson, Kind, NotFound, RunNotFound, TooLarge, by_kind, by_reason
from pawl.job_store.ledger.rules import labels as kept
from pawl.server.rpc.fairness import FairQueue, FairSlots
from tests.fakes.manual_clock import ManualClock
from tests.tables import not_explained, not_refused


def test_ids_have_no_characters_special_in_subjects_paths_or_keys() -> None:
    assert [check_id(value, "run_id") for value in ("a", "A-Z_09", "x" * 64)] == ["a", "A-Z_09", "x" * 64]
    assert check_id("", "run_id", optional=True) == ""
    wrong = ("x" * 65, "a.b", "a b", "a\n", "é", "a/b", "*", ">", "a\0")
    for value, optional in (("", False), *((value, optional) for value in wrong for optional in (True, False))):
        with pytest.raises(InvalidId) as caught:
            check_id(value, "run_id", optional=optional)
        assert caught.value.metadata == {"field": "run_id"}


def test_a_new_id_is_a_prefix_and_26_digits(ids: IdSource) -> None:
    new = ids.new("run")
    assert (bool(re.fullmatch(r"run_[0-9a-hjkmnp-tv-z]{26}", new)), is_id(new)) == (True, True)


async def test_ids_sort_in_creation_order(ids: IdSource, clock: ManualClock) -> None:
    made = []
    for step in (0, 0, 0.0005, 0.001, 5, 0, -3, 0, 3600):
        if step > 0:
            await clock.advance(step)
        else:
            clock.step_back(-step)
        made.append(ids.new("evt"))
    assert made == sorted(set(made))


def test_the_same_clock_and_randomness_give_the_same_ids(clock: ManualClock) -> None:
    same = [IdSource(clock, random.Random(7).getrandbits) for _ in range(2)]
    assert len({source.new("a") for source in same}) == 1
    assert len({IdSource(clock).new("a") for _ in range(200)}) == 200


ANN, BOB = (StoreId("acme"), UserId("ann")), (StoreId("acme"), UserId("bob"))

keys = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,62}", fullmatch=True).filter(lambda key: not key.startswith("pawl."))
values = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=64)
labelled = st.dictionaries(keys, values, max_size=LABELS_MAX)


@given(labelled, labelled)
def test_label_lines_match_only_if_all_labels_match(labels: dict[str, str], wanted: dict[str, str]) -> None:
    """Lines of different users never match. Searches by label rely on both rules."""
    for sought in (wanted, dict(list(labels.items())[::2])):
        lines = set(kept.lines(*ANN, sought))
        assert (lines <= set(kept.lines(*ANN, labels))) == has_all(labels, sought)
        assert not sought or not lines <= set(kept.lines(*BOB, labels))


@given(st.dictionaries(st.text(max_size=70), st.text(max_size=300), max_size=20))
def test_valid_labels_are_stored_unchanged_and_invalid_ones_are_named(labels: dict[str, str]) -> None:
    try:
        assert kept.read(kept.written(*ANN, check_labels(labels, "here"))) == labels
    except InvalidField:
        with pytest.raises(InvalidField, match=r"^here(: | must )"):
            check_labels(labels, "here")


def test_an_invalid_label_is_refused_with_the_reason() -> None:
    rows = [
        *(({key: "x"}, "must be 1 to 63") for key in ("", "Env", "-env", "a" * 64)),
        ({"pawl.run": "x"}, "reserved prefix"),
        ({"env": "é" * 129}, "256 bytes"),
        ({"env": "a\nb"}, "control character"),
        ({"env": "a\0b"}, "control character"),
        ({"env": "a\u2028b"}, "line break"),
    ]
    assert not_explained(InvalidField, check_labels, rows) == []


def test_there_are_at_most_sixteen_labels() -> None:
    most = {f"k{number}": "" for number in range(LABELS_MAX)}
    for labels in (most, most | {"pawl.x": ""}):
        assert check_labels(labels, reserved={"pawl.x"}) == labels
    with pytest.raises(InvalidField, match="at most 16 labels, got 17"):
        check_labels(most | {"k": ""})


@given(items=st.lists(st.binary(max_size=12)), size_max=st.integers(0, 20), items_max=st.integers(1, 5))
def test_parts_keep_the_order_and_only_a_single_item_can_exceed_the_limit(
    items: list[bytes], size_max: int, items_max: int
) -> None:
    parts = list(in_parts(items, len, size_max=size_max, items_max=items_max))
    assert [item for part in parts for item in part] == items
    for part in parts:
        assert 1 <= len(part) <= items_max
        assert len(part) == 1 or sum(map(len, part)) <= size_max


def test_errors_are_caught_by_kind() -> None:
    assert (issubclass(RunNotFound, NotFound), set(by_kind)) == (True, set(Kind))
    assert all(issubclass(error, by_kind[error.kind]) for error in by_reason.values())


LIMIT = 100_000

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values_of_strict_json = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=30
)


def same(left: JsonValue, right: JsonValue) -> bool:
    """Return whether two values are equal, treating 1, 1.0 and True, and 0.0 and -0.0, as different."""
    match left, right:
        case dict(), dict():
            return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
        case list(), list():
            return len(left) == len(right) and all(same(one, other) for one, other in zip(left, right, strict=True))
    return repr(left) == repr(right)


@given(values_of_strict_json)
def test_written_json_reads_back_the_same(value: JsonValue) -> None:
    assert same(loads(dumps_canonical(value), bytes_max=LIMIT), value)


@given(values_of_strict_json)
def test_canonical_json_does_not_depend_on_the_input_form(value: JsonValue) -> None:
    loosely = json.dumps(value, indent=3, ensure_ascii=True).encode()
    assert dumps_canonical(loads(loosely, bytes_max=LIMIT)) == dumps_canonical(value)
    if isinstance(value, dict):
        assert dumps_canonical(dict(reversed(value.items()))) == dumps_canonical(value), "key order does not matter"


@given(st.binary(max_size=200))
def test_any_bytes_are_valid_json_or_raise_invalid_json(data: bytes) -> None:
    try:
        value = loads(data, bytes_max=LIMIT)
    except InvalidJson:
        return
    assert same(json.loads(data), value)


@given(st.lists(st.tuples(texts, values_of_strict_json), min_size=1, max_size=4), st.integers(0, 3))
def test_a_duplicate_key_is_found_at_any_position(members: list[tuple[str, JsonValue]], at: int) -> None:
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


def test_json_that_parsers_disagree_about_is_refused() -> None:
    """C14: malformed arguments are never silently changed."""
    assert not_explained(InvalidJson, lambda data: loads(data, bytes_max=LIMIT), ODD) == []
    with pytest.raises(TooLarge, match="limit of 3"):
        loads(b"NaN!", bytes_max=3)


def test_strict_json_is_accepted_and_numbers_keep_their_type() -> None:
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
    assert dumps_canonical({"é\u2028/": '"\\\n'}) == '{"é\u2028/":"\\"\\\\\\n"}'.encode(), "only JSON escapes"


def test_values_that_cannot_be_read_back_are_not_written() -> None:
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


ITEMS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers()))


def filled(items: list[tuple[str, int]]) -> FairQueue[str, tuple[str, int]]:
    shares = FairQueue[str, tuple[str, int]]()
    for item in items:
        shares.put(item[0], item)
    return shares


@given(items=ITEMS)
def test_each_item_is_returned_once_and_items_of_a_key_keep_their_order(items: list[tuple[str, int]]) -> None:
    shares = filled(items)
    assert len(shares) == len(items)
    taken = [shares.take() for _ in items]
    assert sorted(taken, key=lambda item: item[0]) == sorted(items, key=lambda item: item[0])
    assert not shares
    with pytest.raises(LookupError):
        shares.take()


@given(items=ITEMS)
def test_waiting_keys_take_turns(items: list[tuple[str, int]]) -> None:
    shares = filled(items)
    taken = [shares.take()[0] for _ in items]
    for place, key in enumerate(taken):
        later = taken[place + 1 :]
        if key in later:
            assert sorted(later[: later.index(key)]) == sorted(set(later) - {key})


async def test_a_key_gets_half_of_the_slots_that_other_keys_leave_free() -> None:
    places = FairSlots(8)
    works = {key: [asyncio.get_running_loop().create_future() for _ in range(9)] for key in "abcd"}
    entering = []
    for key, started in works.items():

        async def enter(key: str, work: asyncio.Future[None]) -> str:
            await places.enter(key)
            places.leave_after(work, key)
            return key

        entering += [asyncio.create_task(enter(key, work)) for work in started]
        await asyncio.sleep(0)
    assert [each.result() for each in entering if each.done()] == [*"aaaa", "b", "b", "c", "d"]
    assert not places.has_room("e")
    works["d"][0].set_exception(OSError())
    works["c"][0].cancel()
    await asyncio.sleep(0)
    assert places.has_room("e")
    for work in (work for started in works.values() for work in started if not work.done()):
        work.set_result(None)
    await asyncio.gather(*entering)
    for _ in range(4):
        await places.enter("e")
    assert not places.has_room("e")


# web/console/test/visible.test.ts reads the same file.
TABLE = json.loads((Path(__file__).parents[2] / "golden/visible.json").read_bytes())


def test_hidden_characters_and_lookalike_hosts_are_marked_once() -> None:
    assert [(visible(text), visible(shown)) for text, shown in TABLE] == [(shown, shown) for _, shown in TABLE]


def test_every_unicode_format_character_is_marked() -> None:
    formats = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in {"Cc", "Cf", "Zl", "Zp"}]
    assert [text for text in formats if text not in "\t\n" and visible(text) == text] == []


def test_text_is_truncated_between_characters_and_outside_markers() -> None:
    shown = "ü" + visible("\u202e" * 5)
    cuts = {shortened(shown, size) for size in range(4, len(shown.encode()) + 1)}
    assert cuts == {"...", "ü...", "ü<U+202E>...", *("ü" + "<U+202E>" * n + "..." for n in (2, 3, 4)), shown}
