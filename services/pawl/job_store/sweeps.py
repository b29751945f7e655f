"""The work that the ledger does by itself: relay, offer again, forget, count. Each loop is run under supervision."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from pawl.chassis.process import logs, tasks
from pawl.chassis.process.clock import Clock
from pawl.job_store.conversations.store.search_index import PostgresSearchIndex
from pawl.job_store.erasure.store.retention import PostgresRetention
from pawl.job_store.ledger.ledger import Ledger
from pawl.job_store.ledger.metrics import PrometheusMeter
from pawl.job_store.ledger.reading import DueTimes
from pawl.job_store.ledger.rules.attention import Silence
from pawl.job_store.ledger.store.upkeep import PostgresLedgerStats
from pawl.job_store.lifecycle.store import PostgresOutbox
from pawl.job_store.lifecycle.stream import JetStreamLifecycle
from pawl.job_store.triggers.rules import EVENTS_SECONDS, REFUSALS_TIME
from pawl.job_store.triggers.triggers import Triggers

_RELAY_BATCH: Final = 256
_REMOVAL_BATCH: Final = 100
_ROWS_BATCH: Final = 500
_SENT_BATCH: Final = 1000
_TRIMMED_EVENTS_MAX: Final = 5000
_OFFERS_SECONDS: Final = 1.0
_QUARANTINE_SECONDS: Final = 1.0
_CLOCK_SECONDS: Final = 1.0
# Less than this the clock is taken to be slow, or this process.
_BACK_SECONDS_MIN: Final = 2.0
_RELAY_SECONDS: Final = 1.0
# Events that come so soon after each other go together: each relay costs a transaction.
_GATHER_SECONDS: Final = 0.1
_STATS_SECONDS: Final = 5.0
_STATS_SECONDS_MAX: Final = 60.0
_STATS_PAUSE_TIMES: Final = 500
_SEARCH_SECONDS: Final = 1.0
_SEARCHED_AT_ONCE: Final = 20
# Between two parts of much that is to be taken in, so that others come first.
_SEARCH_PAUSE_SECONDS: Final = 0.05

_log = logs.get_logger(__name__)


class Relay:
    """Moves life-cycle events from the outbox to the stream, in order, until it is empty; again those that it lost."""

    def __init__(self, outbox: PostgresOutbox, stream: JetStreamLifecycle, meter: PrometheusMeter) -> None:
        self._outbox = outbox
        self._stream = stream
        self._meter = meter
        self._written = asyncio.Event()

    def wake(self) -> None:
        """Say that there are new events."""
        self._written.set()

    async def run(self) -> None:
        """Relay for ever: when woken, and every second for what other replicas or earlier failures left."""
        while True:
            tasks.check_cancelled()
            self._written.clear()
            relayed = _RELAY_BATCH
            while relayed == _RELAY_BATCH:
                relayed = await self._outbox.relay(self._stream, events_max=_RELAY_BATCH)
                self._meter.relayed.inc(relayed)
            if await tasks.within(_RELAY_SECONDS, self._written.wait()):
                await asyncio.sleep(_GATHER_SECONDS)


async def offer_again(ledger: Ledger, clock: Clock) -> None:
    """Offer calls again whose client let the lease run out, every second."""
    while True:
        while await ledger.offer_again():
            pass
        await clock.sleep(_OFFERS_SECONDS)


class ClockSweep:
    """Keeps runs from waiting for times that the database's clock had reached before it went back.

    It knows these times from its own looks, and from the database where no replica has looked for a while.
    """

    def __init__(self, due_times: DueTimes, clock: Clock) -> None:
        self._due_times = due_times
        self._clock = clock
        self._seen: tuple[float, float] | None = None

    async def run(self) -> None:
        """Look every second."""
        while True:
            asked_at = self._clock.monotonic()
            time, reached = [time.timestamp() for time in await self._due_times.times()]
            if self._seen is not None:
                seen_time, seen_at = self._seen
                # So much has passed at least, however long an answer has waited for this process to read it.
                reached = max(reached, seen_time + (asked_at - seen_at))
            back_seconds = reached - time
            if back_seconds > _BACK_SECONDS_MIN:
                count = await self._due_times.bring_forward(back_seconds)
                _log.warning("database.clock_went_back", seconds=round(back_seconds, 1), runs=count)
            self._seen = time, self._clock.monotonic()
            await self._clock.sleep(_CLOCK_SECONDS)


class QuarantineSweep:
    """Quarantines the runs that kill their workers."""

    def __init__(self, ledger: Ledger, meter: PrometheusMeter, clock: Clock) -> None:
        self._ledger = ledger
        self._meter = meter
        self._clock = clock
        self._silence = Silence()

    async def run(self) -> None:
        """Sweep every second."""
        while True:
            self._silence = self._silence.after(await self._ledger.doomed(), self._clock.monotonic())
            if count := await self._ledger.quarantine(self._silence.believed):
                self._meter.quarantined.inc(count)
            await self._clock.sleep(_QUARANTINE_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPeriods:
    """The seconds for which each kind of record is kept, and those between two sweeps."""

    events_seconds: float
    conversations_seconds: float
    requests_seconds: float = 48 * 3600.0
    unsent_seconds: float = 24 * 3600.0
    sent_seconds: float = 24 * 3600.0
    keys_seconds: float = 90 * 86_400.0
    interval_seconds: float = 600.0


class RetentionSweep:
    """Removes what is old, a little at a time."""

    def __init__(self, retention: PostgresRetention, clock: Clock, periods: RetentionPeriods) -> None:
        self._retention = retention
        self._clock = clock
        self._periods = periods

    async def run(self) -> None:
        """Sweep at the interval of the retention."""
        while True:
            await self.sweep()
            await self._clock.sleep(self._periods.interval_seconds)

    async def sweep(self) -> None:
        """Remove all that is too old now. What cannot be removed keeps nothing else from going."""
        keep, retention = self._periods, self._retention
        await self._empty(retention.remove_requests, keep.requests_seconds, rows_max=_REMOVAL_BATCH)
        await self._empty(retention.remove_keys, keep.keys_seconds, rows_max=_ROWS_BATCH)
        await self._empty(retention.remove_key_events, None, rows_max=_ROWS_BATCH)
        await self._empty(retention.remove_usage, None, rows_max=_ROWS_BATCH)
        await self._empty(retention.remove_trigger_events, EVENTS_SECONDS, rows_max=_ROWS_BATCH)
        await self._empty(retention.remove_unsent, keep.unsent_seconds, rows_max=_SENT_BATCH)
        await self._empty(retention.remove_sent, keep.sent_seconds, rows_max=_SENT_BATCH)
        await self._empty(retention.trim_logs, keep.events_seconds, events_max=_TRIMMED_EVENTS_MAX)
        await self._empty(retention.remove_summarised, keep.conversations_seconds, rows_max=_ROWS_BATCH)
        await self._empty(retention.remove_conversations, keep.conversations_seconds, rows_max=_ROWS_BATCH)

    async def _empty(self, remove: Callable[..., Awaitable[int]], seconds: float | None, **batch: int) -> None:
        """Remove all that is so old; None for what has an age of its own."""
        bounds = batch if seconds is None else {"older_than_seconds": seconds, **batch}
        try:
            while await remove(**bounds):
                await self._clock.sleep(0)
        except Exception:  # noqa: BLE001  # the next sweep tries it again
            _log.exception("retention.failed", step=remove.__name__)


async def collect_stats(stats: PostgresLedgerStats, meter: PrometheusMeter, clock: Clock) -> None:
    """Count the ledger for the metrics: every 5 s, and up to every 60 s where it takes over 0.2 % of the time."""
    while True:
        began = clock.monotonic()
        meter.ledger_counted(await stats.count())
        pause = (clock.monotonic() - began) * _STATS_PAUSE_TIMES
        await clock.sleep(min(max(_STATS_SECONDS, pause), _STATS_SECONDS_MAX))


async def add_refusals(triggers: Triggers, clock: Clock) -> None:
    """Add to triggers the webhooks that were refused, every minute."""
    while True:
        await clock.sleep(REFUSALS_TIME.total_seconds())
        await triggers.add_refusals()


async def take_in_texts(index: PostgresSearchIndex, clock: Clock) -> None:
    """Make new messages and titles findable, every second."""
    while True:
        while await index.take_in(conversations_max=_SEARCHED_AT_ONCE):
            await clock.sleep(_SEARCH_PAUSE_SECONDS)
        await clock.sleep(_SEARCH_SECONDS)
