"""The ports of the notifier."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from pawl.chassis.ids import StoreId, UserId
from pawl.notifier.domain.announcement import ApprovalAsked, RunChange
from pawl.notifier.domain.notification import Draft, Inbox, Notification, NotificationId
from pawl.notifier.domain.webhook import (
    Attempt,
    Candidate,
    DeliveryId,
    Outcome,
    Verdict,
    Webhook,
    WebhookDelivery,
    WebhookId,
)


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

    async def forget(self, *, older_than_seconds: float, limit: int) -> int:
        """Delete notifications that came longer ago; returns how many. Forget approvers who were not seen since."""

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


class Delivery(Protocol):
    """One event of the life cycle, to be answered exactly once. Unanswered, it comes again."""

    @property
    def attempt(self) -> int:
        """The number of deliveries, this one included."""

    def read(self) -> RunChange | ApprovalAsked | None:
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
class NewWebhook:
    """A webhook to be kept, and the request that made it; an empty request id is of none."""

    inbox: Inbox
    webhook: Webhook
    host: str
    secret: bytes
    request_id: str
    request_hash: bytes


class WebhookRepository(Protocol):
    """Webhooks and their deliveries. Every method raises DependencyUnavailable when the database is away.

    Methods with an inbox raise WebhookNotFound for a webhook of another user.
    """

    async def create(self, new: NewWebhook) -> Webhook:
        """Keep a webhook, or return that of the same request.

        Raises:
            RequestIdReused: the request made another webhook.
            InvalidField: the user has as many as there may be.
        """

    async def webhooks(self, inbox: Inbox) -> Sequence[Webhook]:
        """Return the webhooks of a user, oldest first."""

    async def webhook(self, inbox: Inbox, webhook_id: WebhookId) -> Webhook:
        """Return a webhook."""

    async def update(self, inbox: Inbox, webhook: Webhook, *, host: str) -> Webhook:
        """Replace what a user says of a webhook; disabled, what waits for it is dead."""

    async def delete(self, inbox: Inbox, webhook_id: WebhookId) -> None:
        """Delete a webhook and its deliveries."""

    async def rotate(self, inbox: Inbox, webhook_id: WebhookId, secret: bytes) -> None:
        """Give a webhook another secret; those before sign for a day, too."""

    async def add_test(self, inbox: Inbox, test: WebhookDelivery, body: str) -> WebhookDelivery:
        """Keep a test of a webhook, or return the one that waits. Of those that have ended the newest 20 stay."""

    async def deliveries(
        self, inbox: Inbox, webhook_id: WebhookId, before: tuple[datetime, str] | None, *, limit: int
    ) -> Sequence[WebhookDelivery]:
        """Return deliveries of a webhook before a time and an id (None: from the newest), newest first."""

    async def resend(self, inbox: Inbox, delivery_id: DeliveryId) -> WebhookDelivery:
        """Have a delivery tried now, its tries counted anew; one at work goes on.

        Raises:
            DeliveryNotFound: the user has none of that id.
        """

    async def due(self, at_work: Sequence[Candidate], *, limit: int) -> Sequence[Candidate]:
        """Return deliveries that are due; none of hosts, users, stores and failing webhooks with enough at work.

        Those of users with the fewest at work are first, then the longest due.
        """

    async def claim(self, candidates: Sequence[Candidate], *, seconds: float) -> Sequence[Attempt]:
        """Claim deliveries that are still due; nobody else tries them for so long."""

    async def settle(self, attempt: Attempt, outcome: Outcome, *, chance: float) -> Verdict | None:
        """Write what came of a try, and count it; None if the claim was over and somebody else has it, or it is gone.

        Where that disables the webhook, its user is notified in the same transaction; not of what a test disables.
        """

    async def count_waiting(self) -> int:
        """Return how many deliveries wait."""


class WebhookSender(Protocol):
    """The way to receivers."""

    async def send(self, attempt: Attempt) -> Outcome:
        """Try a delivery; returns within 15 s, whatever the receiver does. Safe to cancel."""

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

    def delivery_tried(self, state: str, seconds: float) -> None:
        """A try of a delivery has ended after so long, and the delivery is now `state`: a DeliveryState."""

    def deliveries_waiting(self, count: int) -> None:
        """So many deliveries wait, over all replicas."""
