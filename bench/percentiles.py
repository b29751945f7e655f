"""Percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values (0 to 1) do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]
