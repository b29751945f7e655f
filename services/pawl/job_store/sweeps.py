"""The job store's background loops: event relay, offers, quarantine, retention, search index and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pawl.chassis.ids import CommandId, ConversationId, IdSource, StoreId
from pawl.chassis.process import logs, tasks
from pawl.chassis.process.clock import Clock
from pawl.errors import PawlError
from pawl.event.v1 import run_pb2
from pawl.job_store.conversations.store.search_index import PostgresSearchIndex
from pawl.job_store.erasure.store.retention import PostgresRetention
from pawl.job_store.ledger.ledger import Ledger
from pawl.job_store.ledger.metrics import PrometheusMeter
from pawl.job_store.ledger.ports import LimitsOf
from pawl.job_store.ledger.reading import DueTimes
from pawl.job_store.ledger.rules.attention import Silence
from pawl.job_store.ledger.rules.rows import ConversationKey
from pawl.job_store.ledger.store.upkeep import PostgresLedgerStats
from pawl.job_store.lifecycle.store import PostgresOutbox
from pawl.job_store.lifecycle.stream import JetStreamLifecycle
from pawl.job_store.store_settings.snapshot import SettingsSnapshot
from pawl.job_store.store_settings.store import PostgresSettings
from pawl.job_store.triggers.rules import EVENTS_SECONDS, REFUSALS_TIME
from pawl.job_store.triggers.triggers import Triggers
from pawl.values import Feature, StopCause

_RELAY_BATCH: Final = 256
_REMOVAL_BATCH: Final = 100
_ROWS_BATCH: Final = 500
_SENT_BATCH: Final = 1000
_TRIMMED_EVENTS_MAX: Final = 5000
_OFFERS_SECONDS: Final = 3.0
_QUARANTINE_SECONDS: Final = 3.0
_DOOMED_SECONDS: Final = 1.0
_CLOCK_SECONDS: Final = 3.0
_OFF_SECONDS: Final = 5.0
_SWITCHED_SECONDS: Final = 1.0
# A process that has just started repeats what an earlier one may not have finished.
_SWITCHED_SECONDS_MAX: Final = 300.0
# Smaller differences come from a slow clock or a slow process.
_BACK_SECONDS_MIN: Final = 2.0
_RELAY_SECONDS: Final = 1.0
# Events are batched for this long, because each relay costs a transaction.
_GATHER_SECONDS: Final = 0.25
_STATS_SECONDS: Final = 15.0
_STATS_SECONDS_MAX: Final = 60.0
_STATS_PAUSE_TIMES: Final = 500
_SEARCH_SECONDS: Final = 3.0
_DAY_SECONDS: Final = 86_400.0
_SIZES_SECONDS: Final = 30.0
# Counting large stores takes at most this fraction of the time.
_SIZES_PAUSE_TIMES: Final = 20
_INDEXED_AT_ONCE: Final = 20
# Pause within a large backlog, so that other work runs first.
_SEARCH_PAUSE_SECONDS: Final = 0.05

_log = logs.get_logger(__name__)


class Relay:
    """Moves life-cycle events from the outbox to the stream, in order.

    Also resends events that the stream has lost.
    """

    def __init__(self, outbox: PostgresOutbox, stream: JetStreamLifecycle, meter: PrometheusMeter) -> None:
        self._outbox = outbox
        self._stream = stream
        self._meter = meter
        self._written = asyncio.Event()

    def wake(self) -> None:
        self._written.set()

    async def run(self) -> None:
        """Relay when woken, and at least every second, to find events left by other replicas or earlier failures.

        Automatic pauses wake no relay, so they are relayed every second.
        """
        time, pauses_due = asyncio.get_running_loop().time, 0.0
        while True:
            tasks.check_cancelled()
            self._written.clear()
            relayed = _RELAY_BATCH
            while relayed == _RELAY_BATCH:
                relayed = await self._outbox.relay(self._stream, events_max=_RELAY_BATCH)
                self._meter.relayed.inc(relayed)
            if time() >= pauses_due:
                await self._outbox.relay_pauses(self._stream, pauses_max=_RELAY_BATCH)
                pauses_due = time() + _RELAY_SECONDS
            if await tasks.within(_RELAY_SECONDS, self._written.wait()):
                await asyncio.sleep(_GATHER_SECONDS)


async def offer_again(ledger: Ledger, clock: Clock) -> None:
    """Every three seconds, re-offer calls whose client's lease has expired."""
    while True:
        while await ledger.offer_again():
            pass
        await clock.sleep(_OFFERS_SECONDS)


async def watch_clock(due_times: DueTimes, clock: Clock) -> None:
    """If the database's clock is set back, make runs claimable earlier, so that they do not have to wait again.

    The clock is polled every three seconds, and compared with the times from earlier polls and other replicas.
    """
    seen: tuple[float, float] | None = None
    while True:
        asked_at = clock.monotonic()
        time, reached = [time.timestamp() for time in await due_times.times()]
        if seen is not None:
            seen_time, seen_at = seen
            # At least this much time has passed, however long this process took to read the answer.
            reached = max(reached, seen_time + (asked_at - seen_at))
        back_seconds = reached - time
        if back_seconds > _BACK_SECONDS_MIN:
            count = await due_times.bring_forward(back_seconds)
            _log.warning("database.clock_went_back", seconds=round(back_seconds, 1), runs=count)
        seen = time, clock.monotonic()
        await clock.sleep(_CLOCK_SECONDS)


async def quarantine(ledger: Ledger, meter: PrometheusMeter, clock: Clock) -> None:
    """Quarantine runs that crash their workers.

    Poll every three seconds, or every second while any run is suspected.
    """
    silence = Silence()
    while True:
        silence = silence.after(await ledger.doomed(), clock.monotonic())
        if count := await ledger.quarantine(silence.confirmed):
            meter.quarantined.inc(count)
        await clock.sleep(_DOOMED_SECONDS if silence.since else _QUARANTINE_SECONDS)


async def start_turns_where_on(settings: SettingsSnapshot, ledger: Ledger, clock: Clock) -> None:
    """After the switch for runs has been set, start turns for the waiting notices in stores where runs are on.

    Every replica does this, because a replica can do it only once it has read the new setting.
    """
    done = clock.now() - _SWITCHED_SECONDS_MAX
    while True:
        set_time = settings.all.runs_set_time
        if set_time is not None and set_time.timestamp() > done:
            after = ConversationKey(StoreId(""), ConversationId(""))
            while keys := await settings.repository.conversations_with_notices(after, rows_max=_ROWS_BATCH):
                after = keys[-1]
                await ledger.start_turns([key for key in keys if Feature.RUNS not in settings.off(key.store_id)])
            done = set_time.timestamp()
        await clock.sleep(_SWITCHED_SECONDS)


async def cancel_where_off(settings: SettingsSnapshot, ledger: Ledger, ids: IdSource, clock: Clock) -> None:
    """Every five seconds, cancel open runs in stores where runs are disabled, if the switch requests this.

    Undo runs continue, so that no undo is left half done.
    """
    while True:
        before = settings.all.cancels_before
        stores = () if before is None else await settings.repository.stores_with_open_runs()
        for store_id in stores:
            if before is not None and Feature.RUNS in settings.all.off(store_id):
                await _cancel_runs(settings.repository, ledger, ids, store_id, before)
        await clock.sleep(_OFF_SECONDS)


async def _cancel_runs(
    repository: PostgresSettings, ledger: Ledger, ids: IdSource, store_id: StoreId, before: datetime
) -> None:
    after = ""
    while runs := await repository.open_runs(store_id, before, after_run=after, runs_max=_ROWS_BATCH):
        after = runs[-1].run.run_id
        for open_run in runs:
            if run_pb2.Run.FromString(open_run.options).HasField("undo"):
                continue
            command_id = CommandId(ids.new("cmd"))
            try:
                await ledger.cancel(open_run.run, open_run.user_id, StopCause.FEATURE_OFF, command_id)
            except PawlError as error:
                _log.warning("run.not_cancelled", run=open_run.run.run_id, reason=error.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPeriods:
    """The retention period of each kind of record except conversations, and the interval between sweeps, in seconds."""

    events_seconds: float
    requests_seconds: float = 48 * 3600.0
    unsent_seconds: float = 24 * 3600.0
    sent_seconds: float = 24 * 3600.0
    keys_seconds: float = 90 * 86_400.0
    interval_seconds: float = 600.0


async def remove_expired(
    retention: PostgresRetention, clock: Clock, periods: RetentionPeriods, limits_of: LimitsOf
) -> None:
    while True:
        await sweep_retention(retention, clock, periods, limits_of)
        await clock.sleep(periods.interval_seconds)


async def sweep_retention(
    retention: PostgresRetention, clock: Clock, keep: RetentionPeriods, limits_of: LimitsOf
) -> None:
    """Remove all expired records. If a step fails, continue with the other steps."""
    await _empty(clock, retention.remove_requests, keep.requests_seconds, rows_max=_REMOVAL_BATCH)
    await _empty(clock, retention.remove_keys, keep.keys_seconds, rows_max=_ROWS_BATCH)
    await _empty(clock, retention.remove_key_events, None, rows_max=_ROWS_BATCH)
    await _empty(clock, retention.remove_usage, None, rows_max=_ROWS_BATCH)
    await _empty(clock, retention.remove_trigger_events, EVENTS_SECONDS, rows_max=_ROWS_BATCH)
    await _empty(clock, retention.remove_unsent, keep.unsent_seconds, rows_max=_SENT_BATCH)
    await _empty(clock, retention.remove_sent, keep.sent_seconds, rows_max=_SENT_BATCH)
    await _empty(clock, retention.trim_logs, keep.events_seconds, events_max=_TRIMMED_EVENTS_MAX)
    for ages, remove in (
        (retention.summary_ages, retention.remove_summarised),
        (retention.conversation_ages, retention.remove_conversations),
    ):
        for store_id, age_seconds in (await _ages(ages)).items():
            seconds = limits_of(store_id).conversation_retention_days * _DAY_SECONDS
            if age_seconds > seconds:
                await _empty(clock, remove, seconds, store_id=store_id, rows_max=_ROWS_BATCH)


async def _ages(ages: Callable[[], Awaitable[Mapping[StoreId, float]]]) -> Mapping[StoreId, float]:
    """Return the age of each store's oldest record, or an empty mapping if the ages cannot be read."""
    try:
        return await ages()
    except Exception:  # noqa: BLE001  # the next sweep tries again
        _log.exception("retention.failed", step=ages.__name__)
        return {}


async def _empty(
    clock: Clock, remove: Callable[..., Awaitable[int]], seconds: float | None, **batch: int | str
) -> None:
    """Call `remove` until nothing is left. If the records have a fixed age limit, pass None for `seconds`."""
    bounds = batch if seconds is None else {"older_than_seconds": seconds, **batch}
    try:
        while await remove(**bounds):
            await clock.sleep(0)
    except Exception:  # noqa: BLE001  # the next sweep tries again
        _log.exception("retention.failed", step=remove.__name__)


async def collect_stats(stats: PostgresLedgerStats, meter: PrometheusMeter, clock: Clock) -> None:
    """Update the ledger's metrics every 15 s or, if counting is slow, at least every 60 s."""
    while True:
        start = clock.monotonic()
        meter.ledger_counted(await stats.count())
        pause = (clock.monotonic() - start) * _STATS_PAUSE_TIMES
        await clock.sleep(min(max(_STATS_SECONDS, pause), _STATS_SECONDS_MAX))


async def count_stored_bytes(settings: SettingsSnapshot, clock: Clock) -> None:
    """Every 30 s (less often if counting is slow), count the data of stores that have a limit."""
    while True:
        start = clock.monotonic()
        try:
            await settings.count_stored_bytes()
        except Exception:  # noqa: BLE001  # the next count tries again, after the usual pause
            _log.exception("stored_bytes.failed")
        pause = (clock.monotonic() - start) * _SIZES_PAUSE_TIMES
        await clock.sleep(max(_SIZES_SECONDS, pause))


async def add_refusals(triggers: Triggers, clock: Clock) -> None:
    """Every minute, add the numbers of newly refused webhooks to their triggers."""
    while True:
        await clock.sleep(REFUSALS_TIME.total_seconds())
        await triggers.add_refusals()


async def index_texts(index: PostgresSearchIndex, clock: Clock) -> None:
    """Every three seconds, index new messages and titles."""
    while True:
        while await index.index_new(conversations_max=_INDEXED_AT_ONCE):
            await clock.sleep(_SEARCH_PAUSE_SECONDS)
        await clock.sleep(_SEARCH_SECONDS)
