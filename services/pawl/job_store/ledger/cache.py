"""Caches the runs whose latest step this replica wrote, and estimates the database's time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from pawl.chassis.ids import RunKey
from pawl.job_store.ledger.rules.rows import CallRow, ConversationRow, RunRow
from pawl.job_store.ledger.rules.steps import ESTIMATE_SECONDS_MAX, CachedRun, is_cacheable

RUNS_MAX: Final = 4096
BYTES_MAX: Final = 64 * 1024 * 1024
# A larger run is not cached.
RUN_BYTES_MAX: Final = 1024 * 1024


class RunCache:
    """A cache of up to `RUNS_MAX` runs and `BYTES_MAX` bytes. Evicts the least recently used entries."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._runs: OrderedDict[RunKey, CachedRun] = OrderedDict()
        self._bytes = 0
        self._time: datetime | None = None
        self._time_at = 0.0

    def get(self, key: RunKey) -> CachedRun | None:
        cached = self._runs.get(key)
        if cached is not None:
            self._runs.move_to_end(key)
        return cached

    def put(self, cached: CachedRun) -> None:
        self.drop(cached.key)
        size_bytes = cached.size_bytes
        if size_bytes > RUN_BYTES_MAX:
            return
        self._runs[cached.key] = cached
        self._bytes += size_bytes
        while len(self._runs) > RUNS_MAX or self._bytes > BYTES_MAX:
            _, dropped = self._runs.popitem(last=False)
            self._bytes -= dropped.size_bytes

    def put_loaded(
        self, run: RunRow, conversation: ConversationRow | None, calls: Sequence[CallRow], version: Any
    ) -> None:
        """Cache a run that was loaded for its owner, together with its conversation and calls.

        Its inbox must be empty.
        """
        if not is_cacheable(run):
            return
        open_calls = tuple(call for call in calls if call.run_id == run.run_id and not call.state.is_terminal)
        self.put(CachedRun(run=run, version=version, calls=open_calls, conversation=conversation))

    def drop(self, key: RunKey) -> None:
        cached = self._runs.pop(key, None)
        if cached is not None:
            self._bytes -= cached.size_bytes

    def note_time(self, time: datetime) -> None:
        """Record the database's time, which has just been read."""
        self._time, self._time_at = time, self._monotonic()

    def now(self) -> datetime | None:
        """Return an estimate of the database's time, which may lag slightly.

        Return None if the time was not read recently.
        """
        elapsed = self._monotonic() - self._time_at
        if self._time is None or elapsed > ESTIMATE_SECONDS_MAX:
            return None
        return self._time + timedelta(seconds=elapsed)
