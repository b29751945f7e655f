"""Whether the memory of a service grows, from what was sampled."""

from __future__ import annotations

import pytest

from bench.memory import slope


def test_a_slope_is_growth_by_x_whatever_the_level() -> None:
    assert slope([(n, 100 + 3 * n) for n in range(10)]) == pytest.approx(3)


def test_a_slope_is_little_moved_by_noise_around_the_line() -> None:
    assert slope([(n, 50 + (-1) ** n) for n in range(1000)]) == pytest.approx(0, abs=0.001)


def test_a_slope_without_width_is_none() -> None:
    assert slope([]) == slope([(1.0, 5.0), (1.0, 9.0)]) == 0.0
