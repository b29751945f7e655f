"""The ports of the notifier."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from pawl.chassis.ids import ConversationId, RunId, StoreId, UserId
from pawl.notifier.domain.announcement import Change, Over
from pawl.notifier.domain.channel import Channel, ChannelId, ChannelKind
from pawl.notifier.domain.delivery import (
    Attempt,
    Candidate,
    ChannelDelivery,
    ChannelEvent,
    DeliveryCount,
    DeliveryFilter,
    DeliveryId,
    Outcome,
    Verdict,
)
from pawl.notifier.domain.notification import Draft, Inbox, Notification, NotificationId
from pawl.notifier.domain.preferences import Mute, Preferences, PreferencesChange


class Store(Protocol):
    """The inboxes, and who approves. Every method raises DependencyUnavailable when the database is away.

    What is for approvers (APPROVAL_NEEDED) is there only for a reader who `approves`.
    """

    async def add(self, drafts: Sequence[Draft]) -> int:
        """Put drafts into their inboxes, in one transaction; returns how many were new.

        Durable on return. A draft whose notification is there already changes
        nothing and takes no number.

        Raises:
            PoisonEvent: the values of a draft cannot be stored, now or ever; nothing is.
        """

    async def note_over(self, over: Sequence[Over]) -> None:
        """Note on what people were told that they are not needed for it any more. Noted again, nothing changes."""

    async def waiting(
        self, conversations: Collection[tuple[Inbox, ConversationId]]
    ) -> AbstractSet[tuple[Inbox, ConversationId]]:
        """Return those of some conversations of users in which a run needs somebody, as they were told."""

    async def read_after(self, inbox: Inbox, number: int, *, approves: bool, limit: int) -> Sequence[Notification]:
        """Return notifications with a greater number, oldest first."""

    async def read_before(
        self, inbox: Inbox, number: int | None, *, only_unread: bool, approves: bool, limit: int
    ) -> Sequence[Notification]:
        """Return notifications with a smaller number (None: from the newest), newest first."""

    async def count_unread(self, inbox: Inbox, *, approves: bool) -> int:
        """Return how many notifications were not read."""

    async def last_numbers(self, inboxes: Sequence[Inbox]) -> Mapping[Inbox, int]:
        """Return the newest number of each inbox that has one."""

    async def acknowledge(
        self, inbox: Inbox, ids: Sequence[NotificationId], *, approves: bool
    ) -> Sequence[Notification]:
        """Mark notifications as read, once; returns them as they are now, in the order of `ids`.

        Raises:
            NotificationNotFound: one is not in the inbox; then nothing is marked.
        """

    def unpublished(self, *, limit: int) -> AbstractAsyncContextManager[Sequence[Notification]]:
        """Hold notifications that were not published yet, oldest first; other replicas get others.

        Leaving without an exception marks them as published; with one, they stay.
        """

    def untold(self, *, limit: int) -> AbstractAsyncContextManager[Sequence[ChannelEvent]]:
        """Hold events of channels that were not published yet, as `unpublished` does; told, they are forgotten."""

    async def forget(self, *, older_than_seconds: float, limit: int) -> int:
        """Delete notifications that came longer ago; returns how many. Forget what else is old, such as approvers."""

    async def note_approver(self, inbox: Inbox) -> None:
        """Remember that the user of an inbox approves calls of the store, and was seen now."""

    async def approvers(self, store_ids: Collection[StoreId]) -> Mapping[StoreId, Sequence[UserId]]:
        """Return who approves in each of some stores: the 100 who were seen last."""


class Announcer(Protocol):
    """The bus, as far as telling goes."""

    async def announce(self, notifications: Sequence[Notification]) -> None:
        """Publish each under its id; on return the bus has them all.

        Raises:
            DependencyUnavailable: the bus is away; some may have been published.
        """

    async def tell(self, events: Sequence[ChannelEvent]) -> None:
        """Publish what became of deliveries and channels, as `announce` does."""


class Delivery(Protocol):
    """One event of the life cycle, to be answered exactly once. Unanswered, it comes again."""

    @property
    def attempt(self) -> int:
        """The number of deliveries, this one included."""

    def read(self) -> Change | None:
        """Return what it tells, or None if it tells nothing for an inbox.

        Raises:
            PoisonEvent: its bytes make no sense and never will.
        """

    async def accept(self) -> None:
        """It is done with."""

    async def retry(self, *, delay_seconds: float) -> None:
        """It shall come again."""

    async def reject(self) -> None:
        """It shall never come again."""


class PoisonEvent(Exception):
    """An event that cannot be read, or whose values cannot be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCode:
    """A code to be sent to an address: the secret that it is made with, and the delivery that takes it there."""

    delivery: ChannelDelivery
    secret: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NewChannel:
    """A channel to be kept, and the request that made it; an empty request id is of none."""

    inbox: Inbox
    channel: Channel
    host: str
    secret: bytes
    request_id: str
    request_hash: bytes
    code: NewCode | None = None
    """The code that is sent, if it has to be confirmed."""


class ChannelRepository(Protocol):
    """Channels and the log of their deliveries. Every method raises DependencyUnavailable when the database is away.

    Methods with an inbox raise ChannelNotFound for a channel of another user.
    """

    async def create(self, new: NewChannel) -> Channel:
        """Keep a channel, or return that of the same request.

        Raises:
            RequestIdReused: the request made another channel.
            InvalidField: the user has as many as there may be, or too many codes were sent.
        """

    async def channels(self, inbox: Inbox) -> Sequence[Channel]:
        """Return the channels of a user, oldest first."""

    async def channel(self, inbox: Inbox, channel_id: ChannelId) -> Channel:
        """Return a channel."""

    async def update(
        self, inbox: Inbox, channel_id: ChannelId, change: Callable[[Channel], tuple[Channel, str]], *, code: NewCode
    ) -> Channel:
        """Replace what a user says of a channel by what `change` makes of it, and its host; nothing comes in between.

        Disabled, what waits for it is dead. To a new address the code is sent.

        Raises:
            PawlError: what `change` raises.
            InvalidField: too many codes were sent.
        """

    async def delete(self, inbox: Inbox, channel_id: ChannelId) -> None:
        """Delete a channel and its deliveries."""

    async def send_code(self, inbox: Inbox, channel_id: ChannelId, code: NewCode) -> None:
        """Have a code be sent in place of the one before.

        Raises:
            InvalidField: the channel has no address to be confirmed, or too many codes were sent.
        """

    async def confirm(self, inbox: Inbox, channel_id: ChannelId, code: str) -> Channel:
        """Confirm the address of a channel, which is enabled then; one that is confirmed stays so.

        Raises:
            InvalidField: it has none, or the code is another one, or no longer good.
        """

    async def unsubscribe(self, store_id: StoreId, token: str) -> None:
        """Disable the e-mail of a store for whose address a token was made, and notify its user.

        Of one that is disabled nothing changes.

        Raises:
            ChannelNotFound: the store has none.
        """

    async def rotate(self, inbox: Inbox, channel_id: ChannelId, secret: bytes) -> None:
        """Give a channel another secret; those before sign for a day, too."""

    async def add_test(self, inbox: Inbox, test: ChannelDelivery, body: str) -> ChannelDelivery:
        """Keep a test of a channel, or return the one that waits. Of those that have ended the newest 20 stay."""

    async def deliveries(
        self, inbox: Inbox, wanted: DeliveryFilter, before: tuple[datetime, str] | None, *, limit: int
    ) -> Sequence[ChannelDelivery]:
        """Return deliveries before a time and an id (None: from the newest), newest first."""

    async def count_deliveries(self, inbox: Inbox, channel_id: ChannelId) -> Sequence[DeliveryCount]:
        """Return how many deliveries of a channel, or with an empty id of all, are in each state."""

    async def resend(self, inbox: Inbox, delivery_ids: Sequence[DeliveryId]) -> Sequence[ChannelDelivery]:
        """Have deliveries tried now, their tries counted anew; one at work goes on. They come in the order of the ids.

        Raises:
            DeliveryNotFound: the user has none of one of the ids; then nothing is sent.
        """


class DeliveryQueue(Protocol):
    """Deliveries that wait. Every method raises DependencyUnavailable when the database is away."""

    async def due(self, at_work: Sequence[Candidate], *, limit: int) -> Sequence[Candidate]:
        """Return deliveries that are due; none of hosts, users, stores and failing channels with enough at work.

        Those of users with the fewest at work are first, then the longest due.
        """

    async def claim(self, candidates: Sequence[Candidate], *, seconds: float) -> Sequence[Attempt]:
        """Claim deliveries that are still due and to be sent now; nobody else tries them for so long.

        Of the others, as `plan` says, some wait and some are not sent.
        """

    async def give_back(self, attempts: Sequence[Attempt]) -> None:
        """Let others try now what was claimed, as if it had not been; nothing comes of those that were settled."""

    async def settle(self, attempt: Attempt, outcome: Outcome, *, chance: float) -> Verdict | None:
        """Write what came of a try, and count it; None if the claim was over and somebody else has it, or it is gone.

        Where that disables the channel, its user is notified in the same transaction; not of what a test disables.
        """

    async def note_viewers(self, viewers: Collection[tuple[Inbox, RunId]]) -> None:
        """Note that users have seen runs as they are now, as far as they have channels."""

    async def count_waiting(self) -> Mapping[ChannelKind, tuple[int, float]]:
        """Return how many deliveries wait, to channels of each kind, and for how many seconds one is due.

        That is of those that nobody tries, to channels that do not fail.
        """


class PreferenceRepository(Protocol):
    """The preferences of users. Every method raises DependencyUnavailable when the database is away."""

    async def preferences(self, inbox: Inbox) -> Preferences:
        """Return the preferences of a user, with the mutes that hold."""

    async def change(self, inbox: Inbox, change: PreferencesChange) -> None:
        """Change preferences; what waits is looked at again."""

    async def mute(self, inbox: Inbox, mute: Mute) -> None:
        """Have nothing of a conversation be sent.

        Raises:
            InvalidField: the user mutes as many as there may be.
        """

    async def unmute(self, inbox: Inbox, conversation_id: ConversationId) -> None:
        """End the mute of a conversation, if there is one."""


class ChannelSender(Protocol):
    """The way to receivers of one kind."""

    async def send(self, attempt: Attempt) -> Outcome:
        """Try a delivery; returns within 16 s, whatever the receiver does. Safe to cancel."""

    async def rest(self, attempt: Attempt) -> None:
        """Return when nothing of a try goes on, such as the look-up of a name that took too long. Safe to cancel."""


class Counters(Protocol):
    """The counters of the use cases."""

    def event_taken(self, outcome: str) -> None:
        """`outcome`: notified, ignored, rejected or retried."""

    def published(self, count: int) -> None:
        """Notifications were handed to the bus."""

    def watching(self, count: int) -> None:
        """So many subscriptions are open."""

    def delivery_tried(self, kind: str, state: str, seconds: float) -> None:
        """A try of a delivery to a ChannelKind has ended after so long, and it is now `state`: a DeliveryState."""

    def deliveries_waiting(self, kind: str, count: int, delay_seconds: float) -> None:
        """So many deliveries to a ChannelKind wait, over all replicas, and one is due for so long."""
