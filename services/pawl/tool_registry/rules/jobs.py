"""A call in the background, as its conversation sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as its conversation sees it. Times are seconds since 1970."""

    job_id: str
    tool: str
    state: str
    is_over: bool
    waits_for_time: bool
    """True if the time of its next iteration has not come."""
    begin_time: float
    interval_seconds: float
    """0 if it makes its call once."""
    end_time: float | None
    iterations: int
    result: str
    """The result of its last iteration."""
    error: str

    def next_time(self, now: float) -> float | None:
        """Return when the next iteration is due, on the beat of the job; None if none is known to come."""
        if not self.waits_for_time or not self.interval_seconds:
            return None
        beats = math.floor((now - self.begin_time) / self.interval_seconds) + 1
        due = self.begin_time + self.interval_seconds * max(0, beats)
        return None if self.end_time is not None and due > self.end_time else due
