"""From the life cycle into the inboxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pawl.chassis import logs
from pawl.errors import Unavailable
from pawl.notifier.app.ports import Counters, Delivery, PoisonEvent, Store
from pawl.notifier.domain.announcement import draft_notification
from pawl.notifier.domain.notification import Draft

ATTEMPTS_MAX: Final = 8
"""Deliveries of an event whose values the store refuses. Whatever else is wrong is not the event's fault."""

_RETRY_SECONDS: Final = 1.0
_RETRY_SECONDS_MAX: Final = 30.0

_log = logs.get_logger(__name__)


class Intake:
    """Takes events, many at a time; one that cannot be taken holds up no other."""

    def __init__(self, store: Store, counters: Counters, *, on_new: Callable[[], None]) -> None:
        self._store = store
        self._counters = counters
        self._on_new = on_new

    async def take(self, deliveries: Sequence[Delivery]) -> None:
        """Make the notifications of these events durable, then answer the events.

        Safe to cancel: an event that was not answered comes again.
        """
        drafts: list[tuple[Delivery, Draft]] = []
        for delivery in deliveries:
            draft = await self._read(delivery)
            if draft is not None:
                drafts.append((delivery, draft))
        if drafts:
            await self._add(drafts)

    async def _read(self, delivery: Delivery) -> Draft | None:
        """Return the draft of an event; answers one that gives none."""
        try:
            change = delivery.read()
        except PoisonEvent as error:
            _log.warning("intake.event_unreadable", error=str(error))
            await self._reject(delivery)
            return None
        draft = draft_notification(change) if change is not None else None
        if draft is None:
            await delivery.accept()
            self._counters.event_taken("ignored")
        return draft

    async def _add(self, drafts: Sequence[tuple[Delivery, Draft]]) -> None:
        try:
            added = await self._store.add([draft for _, draft in drafts])
        except Unavailable:
            for delivery, _ in drafts:
                await self._retry(delivery)
            return
        except Exception as error:  # noqa: BLE001  # whatever one event does, the others go on
            if len(drafts) == 1:
                await self._postpone(drafts[0][0], error)
                return
            _log.warning("intake.batch_failed", events=len(drafts), exc_info=True)
            for one in drafts:
                await self._add([one])
            return
        if added:
            self._on_new()
        for delivery, _ in drafts:
            await delivery.accept()
            self._counters.event_taken("notified")

    async def _postpone(self, delivery: Delivery, error: Exception) -> None:
        """Try an event that failed alone again; give it up in the end only where its own values are at fault."""
        _log.warning("intake.event_failed", attempt=delivery.attempt, exc_info=error)
        if isinstance(error, PoisonEvent) and delivery.attempt >= ATTEMPTS_MAX:
            await self._reject(delivery)
        else:
            await self._retry(delivery)

    async def _retry(self, delivery: Delivery) -> None:
        delay = min(_RETRY_SECONDS * 2 ** min(delivery.attempt - 1, 10), _RETRY_SECONDS_MAX)
        await delivery.retry(delay_seconds=delay)
        self._counters.event_taken("retried")

    async def _reject(self, delivery: Delivery) -> None:
        await delivery.reject()
        self._counters.event_taken("rejected")
