"""Streams of runs: past events from the ledger, then live events in the same format.

All watchers of a run on this replica share one feed, which has a live subscription, a ledger reader and a tail of
recent events. A watcher first reads past events at its own pace until it reaches the tail. If it later falls behind the
tail, it is disconnected (EVT-3), so a slow watcher neither delays others nor uses memory.

Clients confirm the events that the user has seen, and Pawl does not notify the user about these. An open stream does
not prove that events were seen, because its connection may be dead.

The ledger is polled to find lost live events. This happens every few seconds, or every second if NATS is unavailable.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Final, Self

from pawl.agent.v1.steps_pb2 import ListStepsRequest, ListStepsResponse, Step, WatchStepsResponse
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.feed import Feed, Watcher
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.live import BusEvents
from pawl.agent_loop.api.step_history import Steps
from pawl.agent_loop.loop.rules import checks
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RunId, StoreId, UserId
from pawl.chassis.process.tasks import shield, start
from pawl.chassis.rpc.parts import in_parts
from pawl.errors import InvalidPageToken, Overloaded, SeqBeyondEnd, SlowConsumer
from pawl.event.v1.event_pb2 import RunEvent
from pawl.event.v1.gap_pb2 import Gap
from pawl.event.v1.run_pb2 import Run
from pawl.server.process.metrics import Metrics
from pawl.values import ENDED, RESTING

# Maximum number of watched runs per replica.
FEEDS_MAX: Final = 10_000
# Maximum number of feeds that read the ledger concurrently.
READERS_MAX: Final = 64
POLL_SECONDS: Final = 1.0
# Finds events that were lost because only the ledger lost its NATS connection.
CONNECTED_POLL_SECONDS: Final = 5.0
# Proxies end requests that take longer than 60 s.
REST_SECONDS_MAX: Final = 50.0


class Watches:
    """All watchers on this replica. An async context manager that stops the feeds on exit."""

    def __init__(
        self,
        *,
        ledger: PublicLedger,
        live: BusEvents,
        poll_seconds: float = POLL_SECONDS,
        connected_poll_seconds: float = CONNECTED_POLL_SECONDS,
    ) -> None:
        self._ledger = ledger
        self._live = live
        self._poll_seconds = poll_seconds
        self._polls_when_connected = max(1, round(connected_poll_seconds / poll_seconds))
        self._viewers: set[tuple[StoreId, UserId, RunId]] = set()
        self._readers = asyncio.Semaphore(READERS_MAX)
        self._feeds: dict[tuple[StoreId, UserId, RunId], Feed] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._stopping: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._ticker = asyncio.get_running_loop().create_task(self._tick(), name="watch.ticker")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        feeds, self._feeds = self._feeds, {}
        for feed in feeds.values():
            await feed.stop()
        await asyncio.gather(*self._stopping)

    @property
    def feed_count(self) -> int:
        return len(self._feeds)

    def measure(self, metrics: Metrics) -> None:
        watchers = metrics.gauge("watchers", "Open streams of run events.")
        watchers.set_function(lambda: sum(len(feed.watchers) for feed in self._feeds.values()))
        behind = metrics.gauge("watch_lag_events", "Events that this replica's slowest watcher has not received yet.")
        behind.set_function(lambda: max((feed.lag for feed in self._feeds.values()), default=0))

    @asynccontextmanager
    async def open(self, caller: Principal, run_id: RunId, after_seq: int) -> AsyncIterator[Watcher]:
        """Watch a run's events after `after_seq` for the duration of the block.

        If the watcher falls too far behind, the block is cancelled wherever its task is waiting.

        Raises:
            RunNotFound, SeqBeyondEnd, Overloaded: Raised before the block starts.
            SlowConsumer: Raised inside the block. The metadata contains the position from which to attach again.
        """
        key = (caller.store_id, caller.user_id, run_id)
        feed = self._feeds.get(key)
        if feed is None:
            if len(self._feeds) >= FEEDS_MAX:
                raise Overloaded(f"at most {FEEDS_MAX} runs can be watched on one replica: try again later")
            feed = self._feeds[key] = Feed(self._ledger, self._live, caller, run_id, readers=self._readers)
        watcher = Watcher(feed, after_seq)
        feed.watchers[watcher] = None
        try:
            await feed.subscribe()
            await watcher.read_past()
            async with asyncio.timeout(None) as watcher.scope:
                yield watcher
        except TimeoutError:
            if not watcher.cut:
                raise
            raise SlowConsumer(
                f"the client fell behind: attach again after seq {watcher.position}",
                resume_after_seq=watcher.position,
                run_id=run_id,
            ) from None
        finally:
            del feed.watchers[watcher]
            if not feed.watchers and self._feeds.get(key) is feed:
                del self._feeds[key]
                await self._stop(feed)

    def confirm(self, caller: Principal, run_id: RunId) -> None:
        self._viewers.add((caller.store_id, caller.user_id, run_id))

    async def wait_for_rest(self, caller: Principal, run_id: RunId, *, seconds: float, after_seq: int = 0) -> Run:
        """Return the run once it has ended, or once it is parked and has events after `after_seq`.

        After `seconds` (at most 50), return the run in its current state.

        Raises:
            RunNotFound
        """
        run = await self._ledger.get_run(caller, run_id)
        if 0 < run.last_seq <= after_seq:
            self.confirm(caller, run_id)
        if seconds == 0:
            return run
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, REST_SECONDS_MAX)):
                while run.state not in ENDED and not (run.state in RESTING and run.last_seq > after_seq):
                    with suppress(SlowConsumer):
                        await self._rests(caller, run)
                    run = await self._ledger.get_run(caller, run_id)
                return run
        return await self._ledger.get_run(caller, run_id)

    async def _rests(self, caller: Principal, run: Run) -> None:
        state: int = run.state
        async with self.open(caller, RunId(run.run_id), run.last_seq) as watcher, aclosing(watcher.events()) as events:
            async for event in events:
                if isinstance(event, Gap) or (state := event.run_changed.run.state or state) in RESTING:
                    return

    async def _stop(self, feed: Feed) -> None:
        """Stop the feed completely, even if the client disconnects in the meantime."""
        await shield(start(self._stopping, feed.stop(), name="watch.stop"))

    async def _tick(self) -> None:
        """Poll all feeds if NATS is or just was unavailable. Otherwise, poll each feed at longer intervals."""
        was_connected = False
        for tick in itertools.count():
            await asyncio.sleep(self._poll_seconds)
            connected = self._live.connected
            everyone = not (connected and was_connected)
            was_connected = connected
            for number, feed in enumerate(self._feeds.values()):
                # The first event may be lost before the NATS subscription takes effect. A short run that has ended by
                # then needs no poll.
                is_due = (tick + number) % self._polls_when_connected == 0
                if everyone or is_due or not (feed.polled or feed.is_new):
                    feed.poll()
                feed.is_new = False
            viewers, self._viewers = self._viewers, set()
            await self._live.report_viewers(sorted(viewers))


_STEPS_PER_PAGE: Final = 50
_PAGE_BYTES_MAX: Final = 2 * 1024 * 1024


class RunSteps:
    """Steps of runs, derived from their logs. Stateless."""

    def __init__(self, *, ledger: PublicLedger, watches: Watches) -> None:
        self._ledger = ledger
        self._watches = watches

    async def list(self, caller: Principal, request: ListStepsRequest) -> ListStepsResponse:
        """Return a page of the current steps, in order, starting after the step in the page token.

        Raises:
            InvalidId, InvalidField, RunNotFound
            InvalidPageToken: The run does not have the step in the token.
        """
        run_id, steps_max = convert.run_id(request), checks.page_size(request.page_size) or _STEPS_PER_PAGE
        found = await self._all(caller, run_id)
        start = next((number for number, each in enumerate(found, 1) if each.step_id == request.page_token), 0)
        if request.page_token and not start:
            raise InvalidPageToken
        wanted = found[start : start + steps_max]
        # A page has at least one step.
        response = ListStepsResponse(steps=next(in_parts(wanted, Step.ByteSize, size_max=_PAGE_BYTES_MAX), []))
        if start + len(response.steps) < len(found):
            response.next_page_token = response.steps[-1].step_id
        return response

    async def _all(self, caller: Principal, run_id: RunId) -> Sequence[Step]:
        steps, after_seq = Steps(), 0
        while True:
            page = await self._ledger.list_events(caller, run_id, after_seq)
            if page.HasField("gap"):
                steps.take_gap(page.gap)
                after_seq = page.gap.to_seq
            steps.take(map(RunEvent.FromString, page.events))
            after_seq += len(page.events)
            if not page.events or after_seq >= page.last_seq:
                return steps.all()

    async def watch(
        self, caller: Principal, run_id: RunId, after_seq: int, *, silence_seconds: float
    ) -> AsyncGenerator[WatchStepsResponse, None]:
        """Yield the changes to steps after `after_seq` until the run ends.

        Each part includes the seq of its last event. Events that do not change a step are skipped. After
        `silence_seconds` without an event, yield a part without changes. Use it inside `contextlib.aclosing`.

        Raises:
            RunNotFound, SeqBeyondEnd, Overloaded, SlowConsumer
        """
        run = await self._ledger.get_run(caller, run_id)
        if after_seq > run.last_seq:
            raise SeqBeyondEnd(last_seq=run.last_seq)
        steps, seq = Steps(), 0
        async with (
            self._watches.open(caller, run_id, 0) as watcher,
            aclosing(watcher.pages(silence_seconds=silence_seconds)) as pages,
        ):
            async for page in pages:
                if isinstance(page, Gap):
                    changes, seq = steps.take_gap(page), page.to_seq
                    if seq > after_seq:
                        yield WatchStepsResponse(changes=changes, seq=seq)
                    continue
                if not page:
                    yield WatchStepsResponse(seq=seq)
                    continue
                events = [RunEvent.FromString(event) for event in page]
                seq = events[-1].seq
                steps.take(event for event in events if event.seq <= after_seq)
                changes = steps.take(event for event in events if event.seq > after_seq)
                if changes:
                    yield WatchStepsResponse(changes=changes, seq=seq)
