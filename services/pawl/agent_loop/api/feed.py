"""Delivers one run's events to all its watchers, through one live subscription and one ledger reader.

Live events may be lost, duplicated or late, so they only reduce latency. The feed appends events to its tail in order
of seq. It reads the ledger when an event is missing, and whenever `poll` is called.

Events stay encoded: a run's log has no gaps, so an event's position determines its seq.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Final

from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.live import BusEvents
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RunId
from pawl.chassis.process import logs
from pawl.chassis.process.tasks import shield, within
from pawl.chassis.rpc.parts import in_parts
from pawl.errors import NotFound, OutOfRange, PawlError, PermissionDenied, Unauthenticated
from pawl.event.v1.event_pb2 import RunEvent
from pawl.event.v1.gap_pb2 import Gap
from pawl.job.v1.ledger_pb2 import ListEventsResponse
from pawl.server.bus.outbox import Subscription
from pawl.values import ENDED

BEHIND_EVENTS_MAX: Final = 256
BEHIND_BYTES_MAX: Final = 1024 * 1024
# Limits of one page for watchers; a larger event is sent on its own.
_PAGE_EVENTS_MAX: Final = 64
_PAGE_BYTES_MAX: Final = 256 * 1024

_log = logs.get_logger(__name__)


class Watcher:
    """One client's position in a run's event log."""

    def __init__(self, feed: Feed, after_seq: int) -> None:
        self._feed = feed
        self._page: ListEventsResponse | None = None
        self._joined = False
        self.scope: asyncio.Timeout | None = None
        # Seq of the last event that the client has consumed, as shown by its request for the next event.
        self.position = after_seq
        self.cut = False

    async def events(self) -> AsyncGenerator[RunEvent | Gap, None]:
        async with aclosing(self.pages()) as pages:
            async for page in pages:
                if isinstance(page, Gap):
                    yield page
                    continue
                for event in map(RunEvent.FromString, page):
                    yield event
                    self.position = event.seq

    async def pages(self, *, silence_seconds: float | None = None) -> AsyncGenerator[Sequence[bytes] | Gap, None]:
        """Yield encoded events in order, in batches, until the last event.

        Yield an empty page after each `silence_seconds` without an event. If retention has removed events, yield a gap
        instead, even if they were removed while the watcher was catching up.

        Raises:
            PawlError: The log can no longer be read.
        """
        while True:
            if self._page is not None:
                end = self.position
                if self._page.HasField("gap"):
                    yield self._page.gap
                    self.position = end = self._page.gap.to_seq
                for events in _parts(self._page.events):
                    end += len(events)
                    yield events
                    self.position = end
                self._page = None
            elif self._feed.reaches(self.position):
                self._joined = True
                if events := next(_parts(self._feed.after(self.position)), ()):
                    end = self.position + len(events)
                    yield events
                    self.position = end
                elif self._feed.ended:
                    return
                elif not await self._feed.wait(silence_seconds):
                    yield ()
            else:
                await self.read_past()

    async def read_past(self) -> None:
        """Read the page of past events that `pages` will yield next.

        Raises:
            RunNotFound, SeqBeyondEnd
        """
        self._page = await self._feed.read(self.position)

    def leave_tail(self) -> None:
        """Make the watcher read from the ledger again, because the tail is about to skip removed events."""
        self._joined = False

    def check_not_behind(self, first_seq: int) -> None:
        """Disconnect the watcher if the tail, which now starts at `first_seq`, no longer contains its next event."""
        if self._joined and self.position + 1 < first_seq and not self.cut:
            self.cut = True
            if self.scope is not None:
                self.scope.reschedule(asyncio.get_running_loop().time())


class Feed:
    """Delivers one run's events to all of its watchers. `readers` limits concurrent reads across all feeds."""

    def __init__(
        self, ledger: PublicLedger, live: BusEvents, caller: Principal, run_id: RunId, *, readers: asyncio.Semaphore
    ) -> None:
        self._ledger = ledger
        self._live = live
        self._caller = caller
        self._run_id = run_id
        self._readers = readers
        self._subscribing: asyncio.Task[Subscription] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        # The number and bytes of the events in the tail that arrived together.
        self._batches: deque[tuple[int, int]] = deque()
        self._last_seq: int | None = None
        # Seq of the event that ends the run, once it is known.
        self._end_seq: int | None = None
        self._ahead: dict[int, bytes] = {}
        self._due = asyncio.Event()
        self._changed = asyncio.Event()
        self._fault: PawlError | None = None
        self.watchers: dict[Watcher, None] = {}
        self.polled = False
        self.is_new = True

    @property
    def lag(self) -> int:
        """The number of known events that the slowest watcher has not consumed yet."""
        last_seq = self._last_seq or 0
        return last_seq - min((last_seq, *(watcher.position for watcher in self.watchers)))

    @property
    def ended(self) -> bool:
        """True once the tail has reached the run's last event."""
        return self._last_seq is not None and self._last_seq == self._end_seq

    async def subscribe(self) -> None:
        """Subscribe once for all watchers. Call this before the first read, so that no event is missed in between."""
        if self._subscribing is None:
            self._subscribing = asyncio.get_running_loop().create_task(
                self._live.subscribe(self._caller.store_id, self._run_id, self._take), name="watch.subscribe"
            )
        await shield(self._subscribing)

    async def stop(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._subscribing is not None:
            subscription = await self._subscribing
            await subscription.unsubscribe()

    async def read(self, after_seq: int) -> ListEventsResponse:
        """Read a page of the log. The tail starts after the first page that reaches the end of the log."""
        page = await self._ledger.list_events(self._caller, self._run_id, after_seq)
        end = _end(page, after_seq)
        if self._last_seq is None and end >= page.last_seq:
            self._last_seq = end
            self._see_end(page)
            self._take_ahead()
            self._reader = asyncio.get_running_loop().create_task(self._read_on(), name="watch.reader")
        return page

    def reaches(self, position: int) -> bool:
        """Return whether the event after `position` is in the tail or will be appended to it next."""
        return self._last_seq is not None and self._first_seq() <= position + 1

    def after(self, position: int) -> Sequence[bytes]:
        """Return the tail's next events after `position`, at most one page, or nothing if there are none yet.

        Raises:
            PawlError: The log can no longer be read.
        """
        index = position + 1 - self._first_seq()
        if index < len(self._tail):
            return tuple(itertools.islice(self._tail, index, index + _PAGE_EVENTS_MAX))
        if self._fault is not None:
            raise self._fault
        return ()

    async def wait(self, seconds: float | None) -> bool:
        """Return True once something has changed, or False after `seconds`."""
        return await within(seconds, self._changed.wait()) or False

    def poll(self) -> None:
        """Schedule a read of the ledger."""
        self.polled = self._last_seq is not None
        self._due.set()

    def _first_seq(self) -> int:
        return (self._last_seq or 0) - len(self._tail) + 1

    async def _take(self, events: Sequence[bytes], last: RunEvent) -> None:
        """Accept live events. Hold back early arrivals until the missing events have arrived."""
        if self._last_seq is not None and last.seq <= self._last_seq:
            return
        if len(self._ahead) + len(events) > BEHIND_EVENTS_MAX:
            self._ahead.clear()
        self._ahead.update(enumerate(events, last.seq - len(events) + 1))
        if last.run_changed.run.state in ENDED:
            self._end_seq = last.seq
        if self._last_seq is not None:
            self._take_ahead()

    def _take_ahead(self) -> None:
        events, seq = list[bytes](), self._last_seq or 0
        while (event := self._ahead.pop(seq + 1, None)) is not None:
            events.append(event)
            seq += 1
        self._ahead = {early: event for early, event in self._ahead.items() if early > seq}
        self._append(events)
        if self._ahead:
            self._due.set()

    def _append(self, events: Sequence[bytes]) -> None:
        """Append consecutive events that arrived together."""
        if not events:
            return
        # The limits apply between the batch that a watcher is reading and this one, so that a large batch alone does
        # not disconnect a watcher.
        while self._batches:
            count, size = self._batches[0]
            if len(self._tail) - count <= BEHIND_EVENTS_MAX and self._tail_bytes - size <= BEHIND_BYTES_MAX:
                break
            self._batches.popleft()
            self._tail_bytes -= size
            for _ in range(count):
                self._tail.popleft()
        for watcher in self.watchers:
            watcher.check_not_behind(self._first_seq())
        self._batches.append((len(events), sum(map(len, events))))
        self._tail_bytes += self._batches[-1][1]
        self._tail.extend(events)
        self._last_seq = (self._last_seq or 0) + len(events)
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _read_on(self) -> None:
        while not self.ended:
            await self._due.wait()
            self._due.clear()
            try:
                async with self._readers:
                    await self._read_to_end()
            except (NotFound, OutOfRange, PermissionDenied, Unauthenticated) as error:
                self._fault = error
                self._wake()
                return
            except PawlError as error:
                _log.info("watch.ledger_unavailable", run=self._run_id, reason=error.reason)
            except Exception:  # noqa: BLE001  # watchers keep waiting; the next poll may succeed
                _log.exception("watch.read_failed", run=self._run_id)

    async def _read_to_end(self) -> None:
        while not self.ended:
            after_seq = self._last_seq or 0
            page = await self._ledger.list_events(self._caller, self._run_id, after_seq)
            if page.HasField("gap"):
                self._skip_to(page.gap.to_seq)
            end = _end(page, after_seq)
            # Live events may have arrived during the read.
            self._append(page.events[(self._last_seq or 0) - end + len(page.events) :])
            self._see_end(page)
            self._take_ahead()
            if not page.events or end >= page.last_seq:
                return

    def _see_end(self, page: ListEventsResponse) -> None:
        if page.ended:
            self._end_seq = page.last_seq
            self._wake()

    def _skip_to(self, seq: int) -> None:
        """Restart the tail after `seq`. Watchers read the skipped part from the ledger."""
        self._tail.clear()
        self._batches.clear()
        self._tail_bytes = 0
        self._last_seq = seq
        for watcher in self.watchers:
            watcher.leave_tail()
        self._wake()


def _parts(events: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return in_parts(events, len, size_max=_PAGE_BYTES_MAX, items_max=_PAGE_EVENTS_MAX)


def _end(page: ListEventsResponse, after_seq: int) -> int:
    return (page.gap.to_seq if page.HasField("gap") else after_seq) + len(page.events)
