"""Computes percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values that at least a `share` (0 to 1) of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]
