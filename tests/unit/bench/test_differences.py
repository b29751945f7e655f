"""What is slower is found to be slower, and what is not, is not."""

from __future__ import annotations

import random

import pytest

from bench.differences import difference

CHOOSER = random.Random(7)
TIMES = [CHOOSER.expovariate(1.0) for _ in range(1000)]


def test_equal_kinds_cannot_be_told_apart() -> None:
    found = difference(TIMES, TIMES)
    assert (found.median_seconds, found.chance, found.by_luck) == (0.0, 0.5, 1.0)
    assert found.low_seconds < 0 < found.high_seconds


def test_a_kind_that_always_takes_longer_does() -> None:
    found = difference([each + 100 for each in TIMES], TIMES)
    assert found.median_seconds == pytest.approx(100)
    assert found.low_seconds <= 100 <= found.high_seconds
    assert found.chance == 1.0
    assert found.by_luck < 1e-9


def test_what_is_as_long_counts_half() -> None:
    assert difference([1.0, 2.0], [1.0, 1.0]).chance == 0.75


def test_a_small_shift_among_chance_is_seen_by_many() -> None:
    other = [CHOOSER.expovariate(1.0) + 0.2 for _ in range(1000)]
    assert difference(other, TIMES).by_luck < 0.001
