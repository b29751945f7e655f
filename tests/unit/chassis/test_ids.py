from __future__ import annotations

import random
import re

import pytest

from pawl.chassis.ids import (
    IdSource,
    check_id,
    is_id,
)
from pawl.errors import InvalidId
from tests.fakes.manual_clock import ManualClock


def test_what_could_mean_something_in_a_subject_path_or_key_is_no_id() -> None:
    assert [check_id(value, "run_id") for value in ("a", "A-Z_09", "x" * 64)] == ["a", "A-Z_09", "x" * 64]
    for value in ("x" * 65, "a.b", "a b", "a\n", "é", "a/b", "*", ">", "a\0"):
        for optional in (True, False):
            with pytest.raises(InvalidId) as caught:
                check_id(value, "run_id", optional=optional)
            assert caught.value.metadata == {"field": "run_id"}
    assert check_id("", "run_id", optional=True) == ""
    with pytest.raises(InvalidId):
        check_id("", "run_id")


def test_a_new_id_is_a_prefix_and_26_digits(ids: IdSource) -> None:
    new = ids.new("run")
    assert re.fullmatch(r"run_[0-9a-hjkmnp-tv-z]{26}", new)
    assert is_id(new)


async def test_ids_sort_in_the_order_they_were_made(ids: IdSource, clock: ManualClock) -> None:
    made = []
    for step in (0, 0, 0.0005, 0.001, 5, 0, -3, 0, 3600):
        if step > 0:
            await clock.advance(step)
        else:
            clock.step_back(-step)
        made.append(ids.new("evt"))
    assert made == sorted(set(made))


def test_the_same_clock_and_randomness_give_the_same_ids_and_other_sources_others(clock: ManualClock) -> None:
    same = [IdSource(clock, random.Random(7).getrandbits) for _ in range(2)]
    assert len({source.new("a") for source in same}) == 1
    assert len({IdSource(clock).new("a") for _ in range(200)}) == 200
