"""From the life cycle into the inboxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pawl.chassis import logs
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import Unavailable
from pawl.notifier.adapters.lifecycle import JetStreamDelivery
from pawl.notifier.adapters.metrics import PrometheusCounters
from pawl.notifier.adapters.postgres import PostgresStore
from pawl.notifier.domain.announcement import (
    ApprovalAsked,
    Change,
    PoisonEvent,
    RunChange,
    StarterPaused,
    draft_job_end,
    draft_notification,
    draft_pause,
    draft_requests,
    over_by,
)
from pawl.notifier.domain.notification import Draft

ATTEMPTS_MAX: Final = 8
"""Deliveries of an event whose values the store refuses. Whatever else is wrong is not the event's fault."""

_RETRY_SECONDS: Final = 1.0
_RETRY_SECONDS_MAX: Final = 30.0

_log = logs.get_logger(__name__)


class Intake:
    """Takes events, many at a time; one that cannot be taken holds up no other."""

    def __init__(self, store: PostgresStore, counters: PrometheusCounters, *, on_new: Callable[[], None]) -> None:
        self._store = store
        self._counters = counters
        self._on_new = on_new

    async def take(self, deliveries: Sequence[JetStreamDelivery]) -> None:
        """Make the notifications of these events durable, then answer the events.

        Safe to cancel: an event that was not answered comes again.
        """
        changes: list[tuple[JetStreamDelivery, Change | None]] = []
        for delivery in deliveries:
            try:
                changes.append((delivery, delivery.read()))
            except PoisonEvent as error:
                _log.warning("intake.event_unreadable", error=str(error))
                await self._reject(delivery)
            except Exception as error:  # noqa: BLE001  # whatever one event does, the others go on
                await self._postpone(delivery, error)
        approvers = await self._approvers(changes)
        drafts: list[tuple[JetStreamDelivery, Sequence[Draft]]] = []
        ends: list[tuple[JetStreamDelivery, Draft]] = []
        for delivery, change in changes:
            if isinstance(change, ApprovalAsked) and approvers is None:
                await self._retry(delivery)
            elif found := _drafts(change, approvers or {}):
                drafts.append((delivery, found))
            elif isinstance(change, RunChange) and (end := draft_job_end(change)):
                ends.append((delivery, end))
            else:
                await self._ignore(delivery)
        if drafts:
            await self._add(drafts)
        await self._note_over([change for _, change in changes if change is not None])
        if ends:
            await self._tell_of_jobs(ends)

    async def _tell_of_jobs(self, ends: Sequence[tuple[JetStreamDelivery, Draft]]) -> None:
        """Tell users of the ends of jobs of which their conversations cannot, since these wait for somebody."""
        try:
            waiting = await self._store.waiting({(draft.inbox, draft.conversation_id) for _, draft in ends})
        except Exception as error:  # noqa: BLE001  # whatever it is, the events come again
            if not isinstance(error, Unavailable):
                _log.warning("intake.waiting_unknown", exc_info=True)
            for delivery, _ in ends:
                await self._retry(delivery)
            return
        told = [(delivery, [draft]) for delivery, draft in ends if (draft.inbox, draft.conversation_id) in waiting]
        for delivery, draft in ends:
            if (draft.inbox, draft.conversation_id) not in waiting:
                await self._ignore(delivery)
        if told:
            await self._add(told)

    async def _note_over(self, changes: Sequence[Change]) -> None:
        """Note which needs are over, so that nobody is told of them any more; nothing depends on it."""
        try:
            await self._store.note_over([over for over in map(over_by, changes) if over is not None])
        except Unavailable as error:
            _log.debug("intake.over_not_noted", reason=error.reason)
        except Exception:  # noqa: BLE001  # whatever it is, people are told of something that is over
            _log.warning("intake.over_not_noted", exc_info=True)

    async def _approvers(
        self, changes: Sequence[tuple[JetStreamDelivery, Change | None]]
    ) -> Mapping[StoreId, Sequence[UserId]] | None:
        """Return who approves in the stores that ask for it; None if that cannot be told now."""
        store_ids = {change.store_id for _, change in changes if isinstance(change, ApprovalAsked)}
        if not store_ids:
            return {}
        try:
            return await self._store.approvers(store_ids)
        except Unavailable:
            return None
        except Exception:  # noqa: BLE001  # whatever it is, the events come again
            _log.warning("intake.approvers_unknown", exc_info=True)
            return None

    async def _add(self, drafts: Sequence[tuple[JetStreamDelivery, Sequence[Draft]]]) -> None:
        try:
            added = await self._store.add([draft for _, each in drafts for draft in each])
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

    async def _postpone(self, delivery: JetStreamDelivery, error: Exception) -> None:
        """Try an event that failed alone again; give it up in the end only where its own values are at fault."""
        _log.warning("intake.event_failed", attempt=delivery.attempt, exc_info=error)
        if isinstance(error, PoisonEvent) and delivery.attempt >= ATTEMPTS_MAX:
            await self._reject(delivery)
        else:
            await self._retry(delivery)

    async def _ignore(self, delivery: JetStreamDelivery) -> None:
        await delivery.accept()
        self._counters.event_taken("ignored")

    async def _retry(self, delivery: JetStreamDelivery) -> None:
        delay = min(_RETRY_SECONDS * 2 ** min(delivery.attempt - 1, 10), _RETRY_SECONDS_MAX)
        await delivery.retry(delay_seconds=delay)
        self._counters.event_taken("retried")

    async def _reject(self, delivery: JetStreamDelivery) -> None:
        await delivery.reject()
        self._counters.event_taken("rejected")


def _drafts(change: Change | None, approvers: Mapping[StoreId, Sequence[UserId]]) -> Sequence[Draft]:
    """Return what is told about a change, to each whom it concerns."""
    if isinstance(change, ApprovalAsked):
        return draft_requests(change, approvers.get(change.store_id, ()))
    if isinstance(change, StarterPaused):
        return [draft_pause(change)]
    draft = draft_notification(change) if isinstance(change, RunChange) else None
    return [draft] if draft is not None else []
