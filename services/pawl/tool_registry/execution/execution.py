"""Executions in this process, each shared by all its callers, and the leases of other processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from msgspec.structs import replace

from pawl.tool_registry.execution.dialogue import Dialogue
from pawl.tool_registry.policy.call import Job
from pawl.tool_registry.rules.execution import ExecutionResult, input_required
from pawl.values import EffectClass, Progress

PROGRESS_INTERVAL_SECONDS: Final = 0.1


class CancelCause(StrEnum):
    USER = "USER"
    CALLERS_GONE = "CALLERS_GONE"
    SHUTDOWN = "SHUTDOWN"
    LEASE_LOST = "LEASE_LOST"
    SILENT = "SILENT"


# Causes unrelated to the call: this process cannot continue the execution, but another one can.
PROCESS_CAUSES: Final = frozenset({CancelCause.SHUTDOWN, CancelCause.LEASE_LOST, CancelCause.SILENT})


class Execution:
    """The progress and result of a call, for any number of callers.

    A journaled execution continues even after its last caller has left.
    """

    def __init__(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self.job = job
        # True if the call may have taken effect.
        self.has_started = False
        self.ended: asyncio.Future[ExecutionResult] = loop.create_future()
        self.cancelled: asyncio.Future[CancelCause] = loop.create_future()
        self.listeners = 0
        # True while a caller that has not attached yet is expected to ask for the result.
        self.is_kept = False
        self.started = loop.time()
        # Number of progress reports and checkpoints that the tool has sent so far.
        self.heartbeats = 0
        # Number of checkpoints that the tool has stored so far.
        self._checkpoints = 0
        self.dialogue = Dialogue(job.answers)
        self._lock = threading.Lock()
        # Progress that is in transit from another thread.
        self._unseen: Progress | None = None
        self._progress: Progress | None = None
        self._news: asyncio.Future[None] = loop.create_future()

    @property
    def will_restart(self) -> bool:
        """True if the execution ends here, but another process will run the call again or reconcile it."""
        cause = self.cancelled.result() if self.cancelled.done() else None
        return cause in PROCESS_CAUSES and (self.job.is_askable or self.job.effect is not EffectClass.AT_MOST_ONCE)

    @property
    def is_abandoned(self) -> bool:
        """True if the execution was cancelled because all its callers left. For a new caller, start a new execution."""
        return self.cancelled.done() and self.cancelled.result() is CancelCause.CALLERS_GONE

    def seconds(self) -> float:
        return asyncio.get_running_loop().time() - self.started

    def note_heartbeat(self) -> None:
        """Count a progress report or checkpoint from the tool. Thread-safe."""
        self.heartbeats += 1

    def note_checkpoint(self) -> None:
        """Publish that the tool has saved a checkpoint."""
        self.note_heartbeat()
        self._checkpoints += 1
        self._announce()

    def report(self, progress: Progress) -> None:
        """Publish progress. Thread-safe. Only the newest report counts, so a tool cannot flood the event loop."""
        self.note_heartbeat()
        with self._lock:
            is_on_its_way = self._unseen is not None
            self._unseen = progress
        if not is_on_its_way and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._show)

    def _show(self) -> None:
        with self._lock:
            self._progress, self._unseen = self._unseen, None
        self._announce()

    def _announce(self) -> None:
        if not self._news.done():
            self._news.set_result(None)

    def cancel(self, cause: CancelCause) -> None:
        """Request cancellation of the execution. Only the first cause counts. Idempotent."""
        if not self.cancelled.done():
            self.cancelled.set_result(cause)

    def finish(self, result: ExecutionResult) -> None:
        if not self.ended.done():
            self.ended.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # Mark the exception as retrieved, in case there are no callers.

    async def watch(self) -> AsyncGenerator[Progress | ExecutionResult, None]:
        """Yield progress and checkpoints, at most ten times per second.

        At the end, yield the result or the tool's question.

        Raises:
            PawlError: There is no result, and the tool is not the cause.
        """
        self.listeners += 1
        checkpoints = self._checkpoints
        try:
            while not self.ended.done():
                if self.job.effect.is_journaled and self.dialogue.question is not None:
                    yield input_required(self.dialogue.question, self.seconds())
                    return
                await wait_any(self.ended, self._news, self.dialogue.asked)
                if self._news.done():
                    self._news = asyncio.get_running_loop().create_future()
                    has_checkpoint, checkpoints = self._checkpoints > checkpoints, self._checkpoints
                    if self._progress is not None or has_checkpoint:
                        yield replace(self._progress or Progress(), has_checkpoint=has_checkpoint)
                    await asyncio.wait({self.ended}, timeout=PROGRESS_INTERVAL_SECONDS)
            yield self.ended.result()
        finally:
            self.listeners -= 1
            self.leave()

    def leave(self) -> None:
        """Cancel the execution if it is not journaled and has no callers left."""
        if not self.listeners and not self.job.effect.is_journaled and not self.ended.done():
            self.cancel(CancelCause.CALLERS_GONE)


async def wait_any(*futures: asyncio.Future[Any], timeout_seconds: float | None = None) -> None:
    await asyncio.wait(futures, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)


_GAP_PART: Final = 0.5


class LeaseWatch:
    """Leases of other processes, tracked with this process's monotonic clock.

    The database stores the end of each lease, according to its own clock. If that clock jumps forward, all leases look
    expired until their holders renew them. A lease therefore counts as expired only if it has also not changed for a
    whole lease period in which this process could read the database. While the database is unavailable, no process can
    renew its lease.
    """

    def __init__(self, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self._since: dict[str, tuple[datetime, float]] = {}
        self._seen_at = 0.0

    def see(self, ends: Mapping[str, datetime], *, asked_at: float, now: float) -> None:
        """Record the leases from a query that was sent at `asked_at` and had returned by `now` (monotonic seconds)."""
        since = self._since if asked_at - self._seen_at <= self.lease_seconds * _GAP_PART else {}
        self._since = {
            holder: known if (known := since.get(holder)) is not None and known[0] == end else (end, now)
            for holder, end in ends.items()
        }
        self._seen_at = asked_at

    def unrenewed(self) -> tuple[list[str], list[datetime]]:
        """Return the holders that have not renewed their leases for a whole lease period, with the ends of the leases.

        Such a lease has expired if the database still contains the same end and that time has passed.
        """
        found = [(holder, end) for holder, (end, at) in self._since.items() if self._seen_at - at >= self.lease_seconds]
        return [holder for holder, _ in found], [end for _, end in found]
