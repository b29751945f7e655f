"""A cache for the results of READ_ONLY tools.

Each process has its own cache in memory. A hit therefore needs no database query, but every replica calls the tool at
least once. A new process starts with an empty cache, because it may run newer tool code. Keys contain the store and
user, so users never share results.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from pawl.chassis.ids import StoreId, UserId
from pawl.tool_registry.policy.call import Job
from pawl.tool_registry.rules.execution import ExecutionResult
from pawl.values import Outcome

_SWEEP_SECONDS: Final = 60.0

CacheKey = tuple[StoreId, UserId, str, int, str, int, str]


@dataclass(frozen=True, slots=True)
class _Kept:
    result: ExecutionResult
    started_at: float
    expires_at: float


class ResultCache:
    """An LRU cache of at most `entries_max` results and `bytes_max` bytes. `monotonic` returns seconds."""

    def __init__(
        self, monotonic: Callable[[], float], *, entries_max: int = 10_000, bytes_max: int = 64 * 1024 * 1024
    ) -> None:
        self._monotonic = monotonic
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._kept: OrderedDict[CacheKey, _Kept] = OrderedDict()
        self._bytes = 0
        self._sweep_at = monotonic() + _SWEEP_SECONDS

    def find(self, job: Job) -> ExecutionResult | None:
        """Return an unexpired cached result of the same call, with a note about its age.

        If there is no such result, return None.
        """
        if not _is_kept(job):
            return None
        key, now = _key(job), self._monotonic()
        cached = self._kept.get(key)
        if cached is None or cached.expires_at <= now:
            return None
        self._kept.move_to_end(key)
        age = now - cached.started_at
        return replace(cached.result, note=f"From the cache: this result is {age:.0f} s old.", duration_seconds=0.0)

    def put(self, job: Job, result: ExecutionResult) -> None:
        """Cache a successful result. Its age counts from the start of the call."""
        has_succeeded = result.outcome is Outcome.SUCCEEDED and not result.is_error
        if not _is_kept(job) or not has_succeeded or result.note or len(result.content) > self._bytes_max:
            return
        now = self._monotonic()
        started_at = now - result.duration_seconds
        self._drop(_key(job))
        self._kept[_key(job)] = _Kept(result, started_at, started_at + job.cache_seconds)
        self._bytes += len(result.content)
        if now >= self._sweep_at:
            self.sweep()
        while len(self._kept) > self._entries_max or self._bytes > self._bytes_max:
            self._drop(next(iter(self._kept)))

    def sweep(self) -> None:
        now = self._monotonic()
        self._sweep_at = now + _SWEEP_SECONDS
        for key in [key for key, cached in self._kept.items() if cached.expires_at <= now]:
            self._drop(key)

    def _drop(self, key: CacheKey) -> None:
        cached = self._kept.pop(key, None)
        if cached is not None:
            self._bytes -= len(cached.result.content)


def _is_kept(job: Job) -> bool:
    """Return whether the result may be cached. Results that depend on a user's answer are not cached."""
    return bool(job.cache_seconds) and not job.answers


def _key(job: Job) -> CacheKey:
    context = job.context
    return (
        context.store_id,
        context.user_id,
        job.definition.name,
        job.version,
        job.source,
        job.running_version,
        job.arguments_sha256,
    )
