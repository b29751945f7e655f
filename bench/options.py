"""What one may choose about a benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`runs`, `at_once`, `repetitions` and `subjects` are those of the comparison; `quick` asks for short forms."""

    subjects: tuple[str, ...]
    runs: int
    at_once: int
    repetitions: int
    soak_seconds: float
    quick: bool

    def seconds(self, whole: float, short: float) -> float:
        """Return how long something lasts: `whole`, or `short` where a short form was asked for."""
        return short if self.quick else whole

    def count(self, whole: int, short: int) -> int:
        """Return how often something is done, as `seconds` does."""
        return short if self.quick else whole
