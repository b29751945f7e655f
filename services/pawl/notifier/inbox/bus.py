"""The notifier's NATS messages: notifications, channel events, and reports of which users watch which runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection
from itertools import chain
from typing import Final

import msgspec

from pawl.chassis.ids import RunId, StoreId, UserId, is_id
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.chassis.process.tasks import within
from pawl.errors import Unavailable
from pawl.notifier.inbox.rules import Inbox
from pawl.notifier.inbox.store import PostgresStore
from pawl.notifier.metrics import PrometheusCounters
from pawl.notify.v1.channel_pb2 import ChannelEvent
from pawl.notify.v1.notify_pb2 import Notification
from pawl.server.bus.connection import Bus

_ALL: Final = "pawl.v1.*.user.*.notifications"
_VIEWERS: Final = "pawl.internal.v1.viewers"

_log = logs.get_logger(__name__)


async def listen(bus: Bus, wake: Callable[[Inbox], None]) -> None:
    """Call `wake` for each notification that any replica publishes."""

    async def on_message(subject: str, _data: bytes) -> None:
        _, _, store_id, _, user_id, _ = subject.split(".")
        wake(Inbox(store_id=StoreId(store_id), user_id=UserId(user_id)))

    await bus.subscribe(_ALL, on_message)


async def listen_for_viewers(bus: Bus, note: Callable[[Collection[tuple[Inbox, RunId]]], Awaitable[None]]) -> None:
    """Call `note` for each report from agent-loop about users who have just seen runs.

    If `note` fails, the report is lost.
    """

    async def on_message(_subject: str, data: bytes) -> None:
        try:
            reported = msgspec.json.decode(data, type=list[tuple[StoreId, UserId, RunId]])
            viewers = [(Inbox(store_id=store, user_id=user), run) for store, user, run in reported]
            if viewers and all(map(is_id, chain.from_iterable(reported))):
                await note(viewers)
        except (msgspec.DecodeError, Unavailable) as error:
            _log.debug("viewers.not_noted", error=type(error).__name__)

    await bus.subscribe(_VIEWERS, on_message)


_BATCH: Final = 100
_SWEEP_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 1.0
_KEEP_SECONDS: Final = 30 * 86_400.0
_FORGET_SECONDS: Final = 3600.0
_FORGET_BATCH: Final = 1000


class Publication:
    """Publishes new notifications and channel events as soon as it is woken. Also polls every five seconds.

    Rows are locked, published and marked in one transaction, so that two replicas never publish the same row. If the
    process crashes during this transaction, rows are published again with the same ids.
    """

    def __init__(self, store: PostgresStore, bus: Bus, counters: PrometheusCounters) -> None:
        self._store = store
        self._bus = bus
        self._counters = counters
        self._new = asyncio.Event()
        # When to poll for channel events again, by the event loop's clock.
        self._channels_due_at = -math.inf

    def wake(self, *, channels_changed: bool = False) -> None:
        if channels_changed:
            self._channels_due_at = -math.inf
        self._new.set()

    async def run(self) -> None:
        while True:
            pause = _SWEEP_SECONDS
            try:
                await self.publish_all()
            except Unavailable as error:
                _log.debug("publication.postponed", reason=error.reason)
                pause, self._channels_due_at = _RETRY_SECONDS, -math.inf
            await within(pause, self._new.wait())

    async def publish_all(self) -> None:
        """Publish all waiting notifications and all due channel events.

        Raises:
            DependencyUnavailable: The database or the bus is unavailable.
        """
        while True:
            self._new.clear()
            async with self._store.unpublished(limit=_BATCH) as notifications:
                if notifications:
                    await self._bus.publish_all(map(_notification_message, notifications))
            self._counters.published.inc(len(notifications))
            if len(notifications) < _BATCH:
                break
        now = asyncio.get_running_loop().time()
        if now < self._channels_due_at:
            return
        self._channels_due_at = now + _SWEEP_SECONDS
        while True:
            async with self._store.unpublished_channel_events(limit=_BATCH) as events:
                if events:
                    await self._bus.publish_all(map(_channel_event_message, events))
            if len(events) < _BATCH:
                return


def _notification_message(notification: Notification) -> tuple[str, bytes, dict[str, str]]:
    subject = f"pawl.v1.{notification.store_id}.user.{notification.user_id}.notifications"
    return subject, notification.SerializeToString(), {"Nats-Msg-Id": notification.notification_id}


def _channel_event_message(event: ChannelEvent) -> tuple[str, bytes, dict[str, str]]:
    headers = {
        "Nats-Msg-Id": event.event_id,
        "ce-specversion": "1.0",
        "ce-id": event.event_id,
        "ce-source": f"/pawl/{event.store_id}",
        "ce-type": f"pawl.{event.type}",
        "ce-subject": event.channel_id,
        "ce-time": event.time.ToJsonString(),
        "content-type": "application/x-protobuf; messageType=pawl.notify.v1.ChannelEvent",
    }
    return f"pawl.v1.{event.store_id}.user.{event.user_id}.channels", event.SerializeToString(), headers


async def forget_old(store: PostgresStore, clock: Clock) -> None:
    """Every hour until cancelled, delete notifications older than 30 days."""
    while True:
        try:
            while await store.forget(older_than_seconds=_KEEP_SECONDS, limit=_FORGET_BATCH) == _FORGET_BATCH:
                pass
        except Unavailable as error:
            _log.debug("retention.postponed", reason=error.reason)
        await clock.sleep(_FORGET_SECONDS)
