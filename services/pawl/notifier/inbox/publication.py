"""From the inboxes onto the bus, and old ones out."""

from __future__ import annotations

import asyncio
from typing import Final

from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.chassis.process.tasks import within
from pawl.errors import Unavailable
from pawl.notifier.inbox.bus import NatsAnnouncer
from pawl.notifier.inbox.store import PostgresStore
from pawl.notifier.metrics import PrometheusCounters

_BATCH: Final = 100
_SWEEP_SECONDS: Final = 1.0
_KEEP_SECONDS: Final = 30 * 86_400.0
_FORGET_SECONDS: Final = 3600.0
_FORGET_BATCH: Final = 1000

_log = logs.get_logger(__name__)


class Publication:
    """Publishes what was not published yet: at once when woken, and every second.

    A row is locked while it is published and marked in the same transaction, so
    replicas do not publish the same one; a crash in between publishes it again
    under the same id.
    """

    def __init__(self, store: PostgresStore, announcer: NatsAnnouncer, counters: PrometheusCounters) -> None:
        self._store = store
        self._announcer = announcer
        self._counters = counters
        self._new = asyncio.Event()

    def wake(self) -> None:
        """There is something to publish."""
        self._new.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            try:
                await self.publish_all()
            except Unavailable as error:
                _log.debug("publication.postponed", reason=error.reason)
            await within(_SWEEP_SECONDS, self._new.wait())

    async def publish_all(self) -> None:
        """Publish all that waits.

        Raises:
            DependencyUnavailable: the database or the bus is away.
        """
        while True:
            self._new.clear()
            async with self._store.unpublished(limit=_BATCH) as notifications:
                if notifications:
                    await self._announcer.announce(notifications)
            self._counters.published.inc(len(notifications))
            if len(notifications) < _BATCH:
                break
        while True:
            async with self._store.untold(limit=_BATCH) as events:
                if events:
                    await self._announcer.tell(events)
            if len(events) < _BATCH:
                return


async def forget_old(store: PostgresStore, clock: Clock) -> None:
    """Delete notifications older than 30 days, every hour, until cancelled."""
    while True:
        try:
            while await store.forget(older_than_seconds=_KEEP_SECONDS, limit=_FORGET_BATCH) == _FORGET_BATCH:
                pass
        except Unavailable as error:
            _log.debug("retention.postponed", reason=error.reason)
        await clock.sleep(_FORGET_SECONDS)
