from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a measurement. `turns`, `runs`, `at_once` and `subjects` are for the comparison.

    `quick` selects the short form of all benchmarks. `sync_milliseconds` is added to each sync on the slow disk of the
    comparison.
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
        """The number of sequential runs that a subject does per turn."""
        return max(5, self.runs // 4)

    def seconds(self, whole: float, short: float) -> float:
        """Return a duration: `short` in the quick form, otherwise `whole`."""
        return short if self.quick else whole

    def count(self, whole: int, short: int) -> int:
        """Return a count: `short` in the quick form, otherwise `whole`."""
        return short if self.quick else whole
