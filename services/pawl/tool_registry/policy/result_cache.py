"""Results of READ_ONLY tools, given again for a while.

In memory, one cache for each process. A hit costs no statement, and a new
process, which may have new code of the tools, begins with nothing; what it costs
is that each replica calls the tool once. The results of one user are never those
of another: store and user are part of the key.
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
    begun_at: float
    expires_at: float


class ResultCache:
    """At most `entries_max` results with `bytes_max` bytes together; the longest unused go first.

    `monotonic` gives seconds of a clock that never goes back.
    """

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
        """Return an earlier result of the same call, with a note of its age, if it is not too old."""
        if not _is_kept(job):
            return None
        key, now = _key(job), self._monotonic()
        kept = self._kept.get(key)
        if kept is None or kept.expires_at <= now:
            return None
        self._kept.move_to_end(key)
        age = now - kept.begun_at
        return replace(kept.result, note=f"From the cache: this result is {age:.0f} s old.", duration_seconds=0.0)

    def put(self, job: Job, result: ExecutionResult) -> None:
        """Keep a result; errors, questions and what hangs on an answer are not kept. Its age counts from its begin."""
        has_succeeded = result.outcome is Outcome.SUCCEEDED and not result.is_error
        if not _is_kept(job) or not has_succeeded or result.note or len(result.content) > self._bytes_max:
            return
        now = self._monotonic()
        begun_at = now - result.duration_seconds
        self._drop(_key(job))
        self._kept[_key(job)] = _Kept(result, begun_at, begun_at + job.cache_seconds)
        self._bytes += len(result.content)
        if now >= self._sweep_at:
            self.sweep()
        while len(self._kept) > self._entries_max or self._bytes > self._bytes_max:
            self._drop(next(iter(self._kept)))

    def sweep(self) -> None:
        """Drop what has expired."""
        now = self._monotonic()
        self._sweep_at = now + _SWEEP_SECONDS
        for key in [key for key, kept in self._kept.items() if kept.expires_at <= now]:
            self._drop(key)

    def _drop(self, key: CacheKey) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._bytes -= len(kept.result.content)


def _is_kept(job: Job) -> bool:
    """Return whether others of the same arguments get results of the call: an answer of a person is for this one."""
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
