"""The ports of the notifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from pawl.notifier.domain.announcement import RunChange
from pawl.notifier.domain.notification import Draft, Inbox, Notification, NotificationId


class Store(Protocol):
    """The inboxes. Every method raises DependencyUnavailable when the database is away."""

    async def add(self, drafts: Sequence[Draft]) -> int:
        """Put drafts into their inboxes, in one transaction; returns how many were new.

        Durable on return. A draft whose notification is there already changes
        nothing and takes no number.

        Raises:
            PoisonEvent: the values of a draft cannot be stored, now or ever; nothing is.
        """

    async def read_after(self, inbox: Inbox, number: int, *, limit: int) -> Sequence[Notification]:
        """Return notifications with a greater number, oldest first."""

    async def read_before(
        self, inbox: Inbox, number: int | None, *, only_unread: bool, limit: int
    ) -> Sequence[Notification]:
        """Return notifications with a smaller number (None: from the newest), newest first."""

    async def count_unread(self, inbox: Inbox) -> int:
        """Return how many notifications were not read."""

    async def last_numbers(self, inboxes: Sequence[Inbox]) -> Mapping[Inbox, int]:
        """Return the newest number of each inbox that has one."""

    async def acknowledge(self, inbox: Inbox, ids: Sequence[NotificationId]) -> Sequence[Notification]:
        """Mark notifications as read, once; returns them as they are now, in the order of `ids`.

        Raises:
            NotificationNotFound: one is not in the inbox; then nothing is marked.
        """

    def unpublished(self, *, limit: int) -> AbstractAsyncContextManager[Sequence[Notification]]:
        """Hold notifications that were not published yet, oldest first; other replicas get others.

        Leaving without an exception marks them as published; with one, they stay.
        """

    async def forget(self, *, older_than_seconds: float, limit: int) -> int:
        """Delete notifications that came longer ago; returns how many."""


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

    def read(self) -> RunChange | None:
        """Return what it tells, or None if it is no change of a run.

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


class Counters(Protocol):
    """The counters of the use cases."""

    def event_taken(self, outcome: str) -> None:
        """`outcome`: notified, ignored, rejected or retried."""

    def published(self, count: int) -> None:
        """Notifications were handed to the bus."""

    def watching(self, count: int) -> None:
        """So many subscriptions are open."""
