"""Compares the durations of two kinds of calls statistically."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_RESAMPLES: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The statistical difference between the durations of two kinds of calls.

    `low_seconds` to `high_seconds` is the 95 % confidence interval of the difference between the medians. `chance` is
    the probability that the first kind takes longer, and `by_luck` is its p-value.
    """

    median_seconds: float
    low_seconds: float
    high_seconds: float
    chance: float
    by_luck: float


def difference(times: Sequence[float], reference: Sequence[float]) -> Difference:
    """Compare the medians by resampling, and determine the probability of longer times with the Mann-Whitney test."""
    chooser = random.Random(1)

    def median(of: Sequence[float]) -> float:
        return statistics.median(chooser.choices(of, k=len(of)))

    shifts = sorted(median(times) - median(reference) for _ in range(_RESAMPLES))
    both = len(times) * len(reference)
    chance = _longer(times, reference) / both
    deviation = math.sqrt((len(times) + len(reference) + 1) / (12 * both))
    return Difference(
        median_seconds=statistics.median(times) - statistics.median(reference),
        low_seconds=shifts[_RESAMPLES // 40],
        high_seconds=shifts[-_RESAMPLES // 40 - 1],
        chance=chance,
        by_luck=math.erfc(abs(chance - 0.5) / deviation / math.sqrt(2)),
    )


def _longer(times: Sequence[float], reference: Sequence[float]) -> float:
    """Return the number of pairs in which the first time is longer. Equal pairs count half."""
    ordered = sorted([(each, 1) for each in times] + [(each, 0) for each in reference])
    pairs, below, at = 0.0, 0, 0
    while at < len(ordered):
        end = at
        while end < len(ordered) and ordered[end][0] == ordered[at][0]:
            end += 1
        mine = sum(which for _, which in ordered[at:end])
        theirs = end - at - mine
        pairs += mine * (below + theirs / 2)
        below, at = below + theirs, end
    return pairs
