"""Subscriptions to an inbox. Existing notifications come first, then new ones from any replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from pawl.chassis.process import logs
from pawl.chassis.process.tasks import within
from pawl.errors import Unavailable
from pawl.notifier.inbox.rules import Inbox
from pawl.notifier.inbox.store import PostgresStore
from pawl.notifier.metrics import PrometheusCounters
from pawl.notify.v1.notify_pb2 import Notification

PAGE: Final = 100

_POLL_SECONDS: Final = 1.0
_log = logs.get_logger(__name__)


class Subscriptions:
    """This replica's subscribers.

    A subscriber reads pages from the store and has no queue, so a slow subscriber holds only its own page. The bus
    wakes subscribers (`wake`). For all subscribers together, one query per second finds notifications that the bus has
    dropped.
    """

    def __init__(self, store: PostgresStore, counters: PrometheusCounters) -> None:
        self._store = store
        self._counters = counters
        self._followers: dict[Inbox, dict[_Follower, None]] = {}

    def wake(self, inbox: Inbox) -> None:
        for follower in self._followers.get(inbox, ()):
            follower.news.set()

    async def run(self) -> None:
        """Poll every second while there are subscribers, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                await self.poll()
            except Unavailable as error:
                _log.debug("subscriptions.poll_postponed", reason=error.reason)

    async def poll(self) -> None:
        """Wake the subscribers whose inboxes have grown.

        Raises:
            DependencyUnavailable: The database is unavailable.
        """
        if not self._followers:
            return
        for inbox, number in (await self._store.last_numbers(list(self._followers))).items():
            for follower in self._followers.get(inbox, ()):
                if number > follower.number:
                    follower.news.set()

    async def follow(
        self, inbox: Inbox, *, approves: bool, after_number: int | None, silence_seconds: float
    ) -> AsyncGenerator[Notification | None, None]:
        """Yield each notification numbered above `after_number` once, in order. Never ends.

        If `after_number` is None, yield only new notifications.

        Yields None after `silence_seconds` without a notification. Close the iterator when done.

        Raises:
            DependencyUnavailable: The database is unavailable. Follow again from the last number.
        """
        follower = _Follower()
        self._followers.setdefault(inbox, {})[follower] = None
        self._counters.subscriptions.inc()
        try:
            if after_number is None:
                after_number = (await self._store.last_numbers([inbox])).get(inbox, 0)
            follower.number = after_number
            while True:
                follower.news.clear()
                page = await self._store.read_after(inbox, follower.number, approves=approves, limit=PAGE)
                for notification in page:
                    follower.number = notification.number
                    yield notification
                if len(page) == PAGE or await within(silence_seconds, follower.news.wait()):
                    continue
                yield None
        finally:
            del self._followers[inbox][follower]
            if not self._followers[inbox]:
                del self._followers[inbox]
            self._counters.subscriptions.dec()


class _Follower:
    __slots__ = ("news", "number")

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.number = 0
