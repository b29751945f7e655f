"""Sends deliveries to their receivers when they are due."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, Protocol

from pawl.chassis.identity.auth import Principal
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.chassis.process.tasks import end, within
from pawl.chassis.rpc.retry import Retry
from pawl.errors import Unavailable
from pawl.notifier.channels.rules import ChannelKind, kind_of
from pawl.notifier.deliveries.rules import LOST, NOT_SENT, TRIES_MAX_AT_ONCE, Attempt, Outcome, choose
from pawl.notifier.deliveries.store import PostgresDeliveries
from pawl.notifier.metrics import PrometheusCounters

# Duration of a claim. Longer than it takes to make an attempt and record its outcome.
CLAIM_SECONDS: Final = 30.0
_SETTLE_SECONDS: Final = 10.0
_CANDIDATES: Final = 500
# Other replicas may have added or released deliveries that are due before those known here.
_SWEEP_SECONDS: Final = 5.0
# How long to wait before retrying due deliveries that may not be sent yet.
_RETRY_SECONDS: Final = 1.0
_GATHER_SECONDS: Final = 0.01
_COUNT_SECONDS: Final = 15.0

_log = logs.get_logger(__name__)


class ChannelSender(Protocol):
    async def send(self, attempt: Attempt) -> Outcome:
        """Attempt a delivery. Return within 16 s, whatever the receiver does. Safe to cancel."""

    async def finish(self, attempt: Attempt) -> None:
        """Wait for an attempt's background work, such as a DNS lookup that timed out. Safe to cancel."""


class Deliveries:
    """Attempts deliveries when it is woken or when one is due. Also polls every five seconds.

    Each delivery is claimed before an attempt, so that two replicas never attempt the same delivery. If a process dies,
    its claims expire and count as failed attempts. If a process stops cleanly, it releases its claims. Attempts are
    limited per host, user and store, and to one at a time for a failing channel, so a receiver that hangs delays only
    its own deliveries.
    """

    def __init__(
        self,
        queue: PostgresDeliveries,
        senders: Mapping[ChannelKind, ChannelSender],
        counters: PrometheusCounters,
        clock: Clock,
        *,
        on_notice: Callable[[], None],
        key_is_gone: Callable[[Principal], bool],
    ) -> None:
        self._queue = queue
        self._senders = senders
        self._counters = counters
        self._clock = clock
        self._on_notice = on_notice
        self._key_is_gone = key_is_gone
        self._due = asyncio.Event()
        self._in_progress: dict[asyncio.Task[None], Attempt] = {}

    def wake(self) -> None:
        self._due.set()

    async def run(self) -> None:
        """Attempt due deliveries until cancelled. Release claims on exit."""
        try:
            while True:
                self._due.clear()
                pause = _RETRY_SECONDS
                try:
                    if await self._start_due():
                        # All slots that free up during this pause are filled with one query and one claim.
                        await asyncio.sleep(_GATHER_SECONDS)
                        continue
                    seconds = await self._queue.due_seconds()
                    if seconds is None or seconds > 0:
                        pause = _SWEEP_SECONDS if seconds is None else min(seconds, _SWEEP_SECONDS)
                except Unavailable as error:
                    _log.debug("deliveries.postponed", reason=error.reason)
                await within(pause, self._due.wait())
        finally:
            attempts = [attempt for attempt in self._in_progress.values() if not attempt.is_lost]
            await end(self._in_progress)
            if attempts:
                with suppress(Unavailable):
                    await self._queue.release(attempts)

    async def count(self) -> None:
        """Update the gauges of waiting deliveries every 15 s until cancelled."""
        while True:
            try:
                for kind, (count, delay_seconds) in (await self._queue.count_waiting()).items():
                    self._counters.waiting.labels(kind).set(count)
                    self._counters.delay.labels(kind).set(delay_seconds)
            except Unavailable as error:
                _log.debug("deliveries.not_counted", reason=error.reason)
            await self._clock.sleep(_COUNT_SECONDS)

    async def _start_due(self) -> bool:
        in_progress = [attempt.candidate for attempt in self._in_progress.values()]
        if len(in_progress) >= TRIES_MAX_AT_ONCE["all"]:
            return False
        found = await self._queue.due(in_progress, limit=_CANDIDATES)
        chosen = choose(found, in_progress)
        attempts = await self._queue.claim(chosen, seconds=CLAIM_SECONDS) if chosen else ()
        for attempt in attempts:
            task = asyncio.create_task(self._hold(attempt), name="delivery")
            self._in_progress[task] = attempt
            task.add_done_callback(self._ended)
        return bool(attempts)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._in_progress[task]
        self.wake()

    async def _hold(self, attempt: Attempt) -> None:
        """Attempt a delivery. The delivery occupies its slots until all its work has ended."""
        await self._try(attempt)
        await self._senders[kind_of(attempt.url)].finish(attempt)

    async def _try(self, attempt: Attempt) -> None:
        delivery_id = attempt.candidate.delivery_id
        try:
            outcome = await self._outcome(attempt)
            verdict = await Retry(self._clock).until_answered(
                lambda: self._queue.settle(attempt, outcome, chance=random.random()),  # noqa: S311  # spreads tries
                seconds_max=_SETTLE_SECONDS,
            )
        except Unavailable as error:
            _log.warning("delivery.outcome_lost", delivery=delivery_id, reason=error.reason)
            return
        except Exception:  # noqa: BLE001  # it counts as lost when the claim expires
            _log.exception("delivery.failed", delivery=delivery_id)
            return
        if verdict is None:
            return
        self._counters.tried.labels(kind_of(attempt.url), verdict.state).observe(outcome.latency_seconds)
        if verdict.disable_reason:
            _log.info("channel.disabled", channel=attempt.candidate.channel_id, reason=verdict.disable_reason)
            self._on_notice()

    async def _outcome(self, attempt: Attempt) -> Outcome:
        if attempt.is_lost:
            return LOST
        if self._key_is_gone(attempt.saved_by):
            return NOT_SENT
        return await self._senders[kind_of(attempt.url)].send(attempt)
