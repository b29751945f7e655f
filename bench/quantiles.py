"""Few numbers that stand for many."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` (over 0, up to 1) of all values do not exceed.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("there is nothing to take a quantile of")
    return sorted(values)[math.ceil(share * len(values)) - 1]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return how fast y grows with x over all (x, y), by least squares; 0 where x does not change."""
    if not points:
        return 0.0
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    width = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / width if width else 0.0
