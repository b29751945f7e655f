"""Notifications on NATS: published for outside subscribers, heard by every replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pawl.chassis.bus import Bus
from pawl.chassis.ids import StoreId, UserId
from pawl.notifier.domain.notification import Inbox, Notification
from pawl.notify.v1 import notify_pb2

_ALL: Final = "pawl.v1.*.user.*.notifications"


class NatsAnnouncer:
    """See `ports.Announcer`. `encode` gives the payload."""

    def __init__(self, bus: Bus, encode: Callable[[Notification], notify_pb2.Notification]) -> None:
        self._bus = bus
        self._encode = encode

    async def announce(self, notifications: Sequence[Notification]) -> None:
        await self._bus.publish_all(
            (
                subject(notification.draft.inbox),
                self._encode(notification).SerializeToString(),
                {"Nats-Msg-Id": notification.draft.notification_id},
            )
            for notification in notifications
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
