"""From the life cycle into the inboxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pawl.chassis.ids import StoreId
from pawl.chassis.process import logs
from pawl.errors import Unavailable
from pawl.event.v1 import event_pb2
from pawl.notifier.inbox.announcement import asks_approval, drafts_of, job_end_of, over_by
from pawl.notifier.inbox.lifecycle import Message, read_event
from pawl.notifier.inbox.rules import PoisonEvent
from pawl.notifier.inbox.store import PostgresStore
from pawl.notifier.metrics import PrometheusCounters

ATTEMPTS_MAX: Final = 8
"""Deliveries of an event whose values the store refuses. Whatever else is wrong is not the event's fault."""

_RETRY_SECONDS: Final = 1.0
_RETRY_SECONDS_MAX: Final = 30.0

_log = logs.get_logger(__name__)

Event = tuple[Message, event_pb2.RunEvent]


class Intake:
    """Takes events, many at a time; one that cannot be taken holds up no other."""

    def __init__(self, store: PostgresStore, counters: PrometheusCounters, *, on_new: Callable[[], None]) -> None:
        self._store = store
        self._counters = counters
        self._on_new = on_new

    async def take(self, messages: Sequence[Message]) -> None:
        """Make the notifications of these events durable, then answer the events.

        Safe to cancel: an event that was not answered comes again.
        """
        events: list[Event] = []
        for message in messages:
            try:
                events.append((message, read_event(message.subject, message.data)))
            except PoisonEvent as error:
                _log.warning("intake.event_unreadable", error=str(error))
                await self._reject(message)
        if events:
            await self._take(events)

    async def _take(self, events: Sequence[Event]) -> None:
        try:
            told = await self._tell([event for _, event in events])
        except Unavailable:
            for message, _ in events:
                await self._retry(message)
        except Exception as error:  # noqa: BLE001  # whatever one event does, the others continue
            if len(events) == 1:
                await self._postpone(events[0][0], error)
                return
            _log.warning("intake.batch_failed", events=len(events), exc_info=True)
            for one in events:
                await self._take([one])
        else:
            for (message, _), is_told in zip(events, told, strict=True):
                await message.ack()
                self._counters.events.labels("notified" if is_told else "ignored").inc()

    async def _tell(self, events: Sequence[event_pb2.RunEvent]) -> list[bool]:
        """Make the notifications durable, and note which needs are over; returns which events anybody is told of."""
        store_ids = {StoreId(event.store_id) for event in events if asks_approval(event)}
        approvers = await self._store.approvers(store_ids) if store_ids else {}
        drafts = [drafts_of(event, approvers.get(StoreId(event.store_id), ())) for event in events]
        if any(drafts) and await self._store.add([draft for each in drafts for draft in each]):
            self._on_new()
        await self._store.note_over([over for event in events if (over := over_by(event)) is not None])
        ends = [job_end_of(event) for event in events]
        conversations = {(end.inbox, end.conversation_id) for end in ends if end}
        # Only where the conversation waits for somebody: any other one speaks of its job.
        waiting = await self._store.waiting(conversations) if conversations else frozenset()
        late = [end if end and (end.inbox, end.conversation_id) in waiting else None for end in ends]
        if any(late) and await self._store.add([end for end in late if end]):
            self._on_new()
        return [bool(each) or end is not None for each, end in zip(drafts, late, strict=True)]

    async def _postpone(self, message: Message, error: Exception) -> None:
        """Try an event that failed alone again; reject it in the end only where its own values are at fault."""
        _log.warning("intake.event_failed", attempt=message.metadata.num_delivered, exc_info=error)
        if isinstance(error, PoisonEvent) and message.metadata.num_delivered >= ATTEMPTS_MAX:
            await self._reject(message)
        else:
            await self._retry(message)

    async def _retry(self, message: Message) -> None:
        delay = min(_RETRY_SECONDS * 2 ** min(message.metadata.num_delivered - 1, 10), _RETRY_SECONDS_MAX)
        await message.nak(delay=delay)
        self._counters.events.labels("retried").inc()

    async def _reject(self, message: Message) -> None:
        await message.term()
        self._counters.events.labels("rejected").inc()
