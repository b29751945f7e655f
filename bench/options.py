"""What one may choose about a benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`turns`, `runs`, `at_once` and `subjects` are those of what is compared in turn; `quick` asks for short forms.

    `sync_milliseconds` is how much longer the slow disk of the comparison takes for a sync.
    """

    subjects: tuple[str, ...]
    runs: int
    at_once: int
    turns: int
    sync_milliseconds: float
    soak_seconds: float
    quick: bool

    @property
    def runs_alone(self) -> int:
        """Return how many runs a subject does in a turn where it does one after the other."""
        return max(5, self.runs // 4)

    def seconds(self, whole: float, short: float) -> float:
        """Return how long something lasts: `whole`, or `short` where a short form was asked for."""
        return short if self.quick else whole

    def count(self, whole: int, short: int) -> int:
        """Return how often something is done, as `seconds` does."""
        return short if self.quick else whole
