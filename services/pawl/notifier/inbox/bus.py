"""Notifications on NATS, and what became of their deliveries: for outside subscribers, and for every replica."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import chain
from typing import Final

import msgspec

from pawl.chassis.bus.connection import Bus
from pawl.chassis.ids import RunId, StoreId, UserId, is_id
from pawl.chassis.process import logs
from pawl.errors import Unavailable
from pawl.notifier.inbox.rules import Inbox, Notification
from pawl.notify.v1 import channel_pb2, notify_pb2

_ALL: Final = "pawl.v1.*.user.*.notifications"
_VIEWERS: Final = "pawl.internal.v1.viewers"

_log = logs.get_logger(__name__)


class NatsAnnouncer:
    """Publishes notifications and events of channels. `encode` gives the payload of a notification."""

    def __init__(
        self,
        bus: Bus,
        encode: Callable[[Notification], notify_pb2.Notification],
    ) -> None:
        self._bus = bus
        self._encode = encode

    async def announce(self, notifications: Sequence[Notification]) -> None:
        """Publish each under its id; on return the bus has them all.

        Raises:
            DependencyUnavailable: the bus is away; some may have been published.
        """
        await self._bus.publish_all(
            (
                subject(notification.draft.inbox),
                self._encode(notification).SerializeToString(),
                {"Nats-Msg-Id": notification.draft.notification_id},
            )
            for notification in notifications
        )

    async def tell(self, events: Sequence[channel_pb2.ChannelEvent]) -> None:
        """Publish what became of deliveries and channels, as `announce` does."""
        await self._bus.publish_all(
            (
                f"pawl.v1.{event.store_id}.user.{event.user_id}.channels",
                event.SerializeToString(),
                {
                    "Nats-Msg-Id": event.event_id,
                    "ce-specversion": "1.0",
                    "ce-id": event.event_id,
                    "ce-source": f"/pawl/{event.store_id}",
                    "ce-type": f"pawl.{event.type}",
                    "ce-subject": event.channel_id,
                    "ce-time": event.time.ToJsonString(),
                    "content-type": "application/x-protobuf; messageType=pawl.notify.v1.ChannelEvent",
                },
            )
            for event in events
        )


def subject(inbox: Inbox) -> str:
    """Return where the notifications of an inbox are published."""
    return f"pawl.v1.{inbox.store_id}.user.{inbox.user_id}.notifications"


async def hear(bus: Bus, wake: Callable[[Inbox], None]) -> None:
    """Call `wake` for each notification that any replica publishes."""

    async def on_message(subject: str, _data: bytes) -> None:
        _, _, store_id, _, user_id, _ = subject.split(".")
        wake(Inbox(store_id=StoreId(store_id), user_id=UserId(user_id)))

    await bus.subscribe(_ALL, on_message)


async def hear_viewers(bus: Bus, note: Callable[[Collection[tuple[Inbox, RunId]]], Awaitable[None]]) -> None:
    """Give `note` which users have just seen which runs, as agent-loop reports; what cannot be noted is lost."""

    async def on_message(_subject: str, data: bytes) -> None:
        try:
            said = msgspec.json.decode(data, type=list[tuple[StoreId, UserId, RunId]])
            viewers = [(Inbox(store_id=store, user_id=user), run) for store, user, run in said]
            if viewers and all(map(is_id, chain.from_iterable(said))):
                await note(viewers)
        except (msgspec.DecodeError, Unavailable) as error:
            _log.debug("viewers.not_noted", error=type(error).__name__)

    await bus.subscribe(_VIEWERS, on_message)
