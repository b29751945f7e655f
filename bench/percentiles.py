from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least a `share` (0 to 1) of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]
