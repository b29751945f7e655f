"""Few numbers that stand for many."""

from __future__ import annotations

import pytest

from bench.quantiles import quantile, slope


@pytest.mark.parametrize(("share", "expected"), [(0.01, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_quantile_is_a_value_that_was_seen(share: float, expected: float) -> None:
    assert quantile([float(n) for n in range(100, 0, -1)], share) == expected


def test_a_quantile_of_one_value_is_that_value() -> None:
    assert quantile([7.0], 0.01) == quantile([7.0], 0.99) == 7.0


def test_a_quantile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        quantile([], 0.5)


def test_a_slope_is_growth_by_x_whatever_the_level() -> None:
    assert slope([(n, 100 + 3 * n) for n in range(10)]) == pytest.approx(3)


def test_a_slope_is_little_moved_by_noise_around_the_line() -> None:
    assert slope([(n, 50 + (-1) ** n) for n in range(1000)]) == pytest.approx(0, abs=0.001)


def test_a_slope_without_width_is_none() -> None:
    assert slope([]) == slope([(1.0, 5.0), (1.0, 9.0)]) == 0.0
