"""A percentile is a value that was seen."""

from __future__ import annotations

import pytest

from bench.percentiles import percentile


@pytest.mark.parametrize(("share", "expected"), [(0.01, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(share: float, expected: float) -> None:
    assert percentile([float(n) for n in range(100, 0, -1)], share) == expected


def test_a_percentile_of_one_value_is_that_value() -> None:
    assert percentile([7.0], 0.01) == percentile([7.0], 0.99) == 7.0
