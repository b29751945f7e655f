"""The rows of the notifier: inboxes, channels, deliveries, and what is noted of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from pawl.chassis.ids import ConversationId, RunId, StoreId
from pawl.notifier.domain.channel import Channel, ChannelId
from pawl.notifier.domain.delivery import ChannelEvent, DeliveryId, DeliveryState, body_of, type_of
from pawl.notifier.domain.notification import Draft, Inbox, Notification, shown
from pawl.notifier.domain.preferences import Preferences

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(kw_only=True)
class NoteRow:
    """A notification, and what is known of it."""

    draft: Draft
    number: int
    insert_time: datetime
    read_time: datetime | None = None
    is_over: bool = False
    is_published: bool = False

    @property
    def notification(self) -> Notification:
        return Notification(draft=shown(self.draft), number=self.number, read_time=self.read_time)


@dataclass(kw_only=True)
class ChannelRow:
    """A channel, with what its user does not see."""

    inbox: Inbox
    channel: Channel
    host: str
    secret: bytes
    request_id: str = ""
    request_hash: bytes = b""
    former: tuple[tuple[bytes, datetime], ...] = ()


@dataclass(kw_only=True)
class DeliveryRow:
    """A delivery; `due_time` is None unless it waits."""

    delivery_id: DeliveryId
    channel_id: ChannelId
    inbox: Inbox
    type: str
    body: str
    number: int | None
    insert_time: datetime
    due_time: datetime | None
    state: DeliveryState = DeliveryState.WAITING
    tries: int = 0
    is_claimed: bool = False
    is_skipped: bool = False
    was_put_off: bool = False
    is_resent: bool = False
    try_time: datetime | None = None
    status: int = 0
    latency_ms: int = 0
    last_error: str = ""

    @property
    def is_asked(self) -> bool:
        return self.number is None or self.is_resent


@dataclass
class NotifierRows:
    """All rows of the notifier, and the time."""

    now: Callable[[], datetime]
    notes: dict[tuple[Inbox, int], NoteRow] = field(default_factory=dict)
    numbers: dict[Inbox, int] = field(default_factory=dict)
    channels: dict[ChannelId, ChannelRow] = field(default_factory=dict)
    deliveries: dict[DeliveryId, DeliveryRow] = field(default_factory=dict)
    events: dict[str, ChannelEvent] = field(default_factory=dict)
    preferences: dict[Inbox, Preferences] = field(default_factory=dict)
    mutes: dict[tuple[Inbox, ConversationId], datetime | None] = field(default_factory=dict)
    viewers: dict[tuple[Inbox, RunId], datetime] = field(default_factory=dict)
    erased: set[tuple[StoreId, ConversationId]] = field(default_factory=set)
    approvers: dict[Inbox, datetime] = field(default_factory=dict)
    held: dict[Hashable, Callable[[], bool]] = field(default_factory=dict)
    """What is locked for longer than an instant, and whether who holds it lives."""
    told: list[ChannelEvent] = field(default_factory=list)
    """The events that were published."""

    def note_of(self, row: DeliveryRow) -> NoteRow | None:
        """Return the notification that a delivery tells; None for a test."""
        return None if row.number is None else self.notes.get((row.inbox, row.number))

    def mutes_of(self, inbox: Inbox, now: datetime) -> dict[ConversationId, datetime | None]:
        """Return the mutes of a user that hold."""
        of_user = {conversation: until for (owner, conversation), until in self.mutes.items() if owner == inbox}
        return {conversation: until for conversation, until in of_user.items() if until is None or until > now}

    def add(self, drafts: Iterable[Draft], now: datetime) -> int:
        """Put drafts into their inboxes, each with a delivery to each channel that tells of it."""
        known = {(row.draft.inbox, row.draft.notification_id) for row in self.notes.values()}
        added = 0
        for draft in drafts:
            key = (draft.inbox, draft.notification_id)
            if key in known or (draft.inbox.store_id, draft.conversation_id) in self.erased:
                continue
            known.add(key)
            added += 1
            number = self.numbers[draft.inbox] = self.numbers.get(draft.inbox, 0) + 1
            self.notes[draft.inbox, number] = NoteRow(draft=draft, number=number, insert_time=now)
            for row in self.channels.values():
                kinds = row.channel.kinds
                if row.inbox == draft.inbox and row.channel.enabled and (not kinds or draft.kind in kinds):
                    self._tell(draft, number, row.channel.channel_id, now)
        return added

    def _tell(self, draft: Draft, number: int, channel_id: ChannelId, now: datetime) -> None:
        digest = hashlib.sha256(f"{draft.notification_id}/{channel_id}".encode()).hexdigest()
        delivery_id = DeliveryId(f"dlv_{digest[:40]}")
        self.deliveries[delivery_id] = DeliveryRow(
            delivery_id=delivery_id,
            channel_id=channel_id,
            inbox=draft.inbox,
            type=type_of(draft.kind),
            body=body_of(shown(draft)),
            number=number,
            insert_time=now,
            due_time=now,
        )

    def remove(self, keys: Iterable[tuple[Inbox, int]]) -> None:
        """Remove notifications with their deliveries."""
        gone = set(keys)
        for key in gone:
            del self.notes[key]
        for row in [row for row in self.deliveries.values() if (row.inbox, row.number) in gone]:
            del self.deliveries[row.delivery_id]

    def tell_end(self, row: DeliveryRow, now: datetime) -> None:
        """Note for outside subscribers that a delivery has ended, if it has."""
        if row.number is None or row.is_skipped or row.state not in {DeliveryState.DELIVERED, DeliveryState.DEAD}:
            return
        self.note_event(f"delivery.{row.state}", row, row.last_error, now)

    def note_event(self, kind: str, row: DeliveryRow, error: str, now: datetime) -> None:
        """Note an event of a channel."""
        is_end = kind.startswith("delivery.")
        event = ChannelEvent(
            event_id=f"evt_{len(self.told) + len(self.events) + 1}",
            type=kind,
            time=now,
            store_id=row.inbox.store_id,
            user_id=row.inbox.user_id,
            channel_id=row.channel_id,
            delivery_id=row.delivery_id,
            tries=row.tries if is_end else 0,
            status=row.status if is_end else 0,
            error=error,
        )
        self.events[event.event_id] = event

    def free(self, keys: Iterable[KeyT]) -> list[KeyT]:
        """Return those that nobody holds who lives."""
        return [key for key in keys if key not in self.held or not self.held[key]()]
