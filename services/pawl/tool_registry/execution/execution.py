"""One execution under way in this process, for everybody who waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from pawl.tool_registry.execution.dialogue import Dialogue
from pawl.tool_registry.policy.call import Job
from pawl.tool_registry.rules.execution import ExecutionResult, input_required
from pawl.values import EffectClass, Progress

PROGRESS_INTERVAL_SECONDS: Final = 0.1


class CancelCause(StrEnum):
    """The reason why an execution is to end."""

    USER = "USER"
    CALLERS_GONE = "CALLERS_GONE"
    SHUTDOWN = "SHUTDOWN"
    LEASE_LOST = "LEASE_LOST"
    SILENT = "SILENT"


LEAVING: Final = frozenset({CancelCause.SHUTDOWN, CancelCause.LEASE_LOST, CancelCause.SILENT})
"""Causes that are none of the call: this process cannot go on with it."""


class Execution:
    """Progress and result of one call, for any number of callers.

    A journaled one goes on when the last caller has gone.
    """

    def __init__(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self.job = job
        self.has_begun = False
        """True if the effect may have happened."""
        self.ended: asyncio.Future[ExecutionResult] = loop.create_future()
        self.cancelled: asyncio.Future[CancelCause] = loop.create_future()
        self.listeners = 0
        self.is_kept = False
        """True if somebody will ask for the result of whom nothing is seen yet."""
        self.started = loop.time()
        self.life_signs = 0
        """The signs of life of its tool so far."""
        self.dialogue = Dialogue(job.answers)
        self._lock = threading.Lock()
        self._unseen: Progress | None = None
        """Progress on its way from another thread."""
        self._progress: Progress | None = None
        self._news: asyncio.Future[None] = loop.create_future()

    @property
    def will_restart(self) -> bool:
        """True if it ends here, and is begun again, or asked for, by whoever is asked for it next."""
        cause = self.cancelled.result() if self.cancelled.done() else None
        return cause in LEAVING and (self.job.is_askable or self.job.effect is not EffectClass.AT_MOST_ONCE)

    @property
    def is_abandoned(self) -> bool:
        """True if it ends because its callers left: a new caller needs a new execution."""
        return self.cancelled.done() and self.cancelled.result() is CancelCause.CALLERS_GONE

    def seconds(self) -> float:
        """Return how long it has been going on."""
        return asyncio.get_running_loop().time() - self.started

    def note_life(self) -> None:
        """Note a sign of life of the tool, from any thread."""
        self.life_signs += 1

    def report(self, progress: Progress) -> None:
        """Show progress to whoever listens, from any thread; only the newest is kept, so that none floods the loop."""
        self.note_life()
        with self._lock:
            is_on_its_way = self._unseen is not None
            self._unseen = progress
        if not is_on_its_way and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._show)

    def _show(self) -> None:
        with self._lock:
            self._progress, self._unseen = self._unseen, None
        if not self._news.done():
            self._news.set_result(None)

    def cancel(self, cause: CancelCause) -> None:
        """Ask for the end; the first cause stays. Idempotent."""
        if not self.cancelled.done():
            self.cancelled.set_result(cause)

    def finish(self, result: ExecutionResult) -> None:
        """Give the result to everybody."""
        if not self.ended.done():
            self.ended.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Give everybody an error in place of a result."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # Seen, also when nobody listens.

    async def watch(self) -> AsyncGenerator[Progress | ExecutionResult, None]:
        """Yield progress, at most ten times a second, then the result, or what the tool asks.

        Raises:
            PawlError: there is no result, for a reason that is not the tool's.
        """
        self.listeners += 1
        try:
            while not self.ended.done():
                if self.job.effect.is_journaled and self.dialogue.question is not None:
                    yield input_required(self.dialogue.question, self.seconds())
                    return
                await wait_any(self.ended, self._news, self.dialogue.asked)
                if self._news.done():
                    self._news = asyncio.get_running_loop().create_future()
                    if self._progress is not None:
                        yield self._progress
                    await asyncio.wait({self.ended}, timeout=PROGRESS_INTERVAL_SECONDS)
            yield self.ended.result()
        finally:
            self.listeners -= 1
            self.leave()

    def leave(self) -> None:
        """End what nobody waits for any more, unless it is journaled."""
        if not self.listeners and not self.job.effect.is_journaled and not self.ended.done():
            self.cancel(CancelCause.CALLERS_GONE)


async def wait_any(*futures: asyncio.Future[Any], timeout_seconds: float | None = None) -> None:
    """Return when one of them is done, or the time is up."""
    await asyncio.wait(futures, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)


_GAP_PART: Final = 0.5


class LeaseWatch:
    """The leases of others as this process has seen them, by its own monotonic clock.

    The record says when a lease ends by the record's clock. After a jump forward it
    says so of all leases, until their holders renew them. So one has ended only when
    it has also stood unchanged for a whole lease, in which this process could read
    the record: while the record is away nobody can renew.
    """

    def __init__(self, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self._since: dict[str, tuple[datetime, float]] = {}
        self._seen_at = 0.0

    def see(self, ends: Mapping[str, datetime], *, asked_at: float, now: float) -> None:
        """Take in when the leases end, as the record said when asked at `asked_at`, and answered until `now`."""
        since = self._since if asked_at - self._seen_at <= self.lease_seconds * _GAP_PART else {}
        self._since = {
            holder: known if (known := since.get(holder)) is not None and known[0] == end else (end, now)
            for holder, end in ends.items()
        }
        self._seen_at = asked_at

    def unrenewed(self) -> tuple[list[str], list[datetime]]:
        """Return who has not renewed for a whole lease, and the ends of their leases.

        They have no lease if the record has the same end still, and says that it has passed.
        """
        found = [(holder, end) for holder, (end, at) in self._since.items() if self._seen_at - at >= self.lease_seconds]
        return [holder for holder, _ in found], [end for _, end in found]
