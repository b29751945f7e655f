"""Consumes run events from JetStream and writes notifications to the inboxes.

All replicas share one durable pull consumer. Each event goes to one replica. If the replica does not acknowledge it
within 10 s, the event goes to another replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import nats.errors
import nats.js.errors
from google.protobuf.message import DecodeError
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from pawl.chassis.ids import StoreId, is_id
from pawl.chassis.process import logs
from pawl.chassis.rpc.trace_context import TRACEPARENT_KEY, valid
from pawl.errors import DependencyUnavailable, Unavailable
from pawl.event.v1 import event_pb2
from pawl.notifier.inbox.announcement import asks, concerns_others, drafts_of, job_end_of, need_resolved_by
from pawl.notifier.inbox.rules import Draft, PoisonEvent
from pawl.notifier.inbox.store import Added, PostgresStore
from pawl.notifier.metrics import PrometheusCounters
from pawl.server.bus.connection import Bus

STREAM: Final = "PAWL_LIFECYCLE"
CONSUMER: Final = "notifier"
SUBJECTS: Final = "pawl.v1.*.lifecycle.*"

_BATCH: Final = 64
_WAIT_SECONDS: Final = 20.0
# Pending messages arrive immediately, unless another replica took them first.
_MORE_SECONDS: Final = 0.05
_PAUSE_SECONDS: Final = 1.0
_ACK_WAIT_SECONDS: Final = 10.0
_UNANSWERED_MAX: Final = 1000

# A run event. JetStream delivers it again unless it is acknowledged.
Message: TypeAlias = Msg

_log = logs.get_logger(__name__)


class JetStreamLifecycle:
    """Passes events to `take` in batches while the bus is connected."""

    def __init__(self, bus: Bus, take: Callable[[Sequence[Message]], Awaitable[None]]) -> None:
        self._bus = bus
        self._take = take

    def start(self) -> None:
        """Start consuming events on the current connection and on all later connections."""
        self._bus.on_connected(self._consume)

    async def _consume(self) -> None:
        waiting = False
        while True:
            try:
                subscription = await self._subscribe(self._bus.jetstream())
                waiting = False
                while True:
                    messages = await _fetch(subscription)
                    if messages:
                        await self._take(messages)
            except (nats.errors.Error, OSError, TimeoutError, DependencyUnavailable) as error:
                # The stream does not exist yet, or was wiped together with the consumer.
                if not waiting:
                    _log.warning("lifecycle.waiting", error=str(error) or type(error).__name__)
                waiting = True
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _subscribe(self, jetstream: JetStreamContext) -> JetStreamContext.PullSubscription:
        await jetstream.add_consumer(
            STREAM,
            ConsumerConfig(
                durable_name=CONSUMER,
                deliver_policy=DeliverPolicy.ALL,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=_ACK_WAIT_SECONDS,
                # No limit, because JetStream would silently drop messages. The intake decides when to reject one.
                max_deliver=-1,
                max_ack_pending=_UNANSWERED_MAX,
                filter_subject=SUBJECTS,
            ),
        )
        return await jetstream.pull_subscribe_bind(durable=CONSUMER, stream=STREAM)


async def _fetch(subscription: JetStreamContext.PullSubscription) -> list[Msg]:
    """Return pending messages, at most one batch, or nothing if there are no events for a while.

    A fetch of several messages waits for the last one, so the first message is fetched separately.
    """
    try:
        messages = await subscription.fetch(1, timeout=_WAIT_SECONDS)
    except nats.errors.TimeoutError:
        return []
    more = min(messages[0].metadata.num_pending, _BATCH - 1)
    if more > 0:
        try:
            messages += await subscription.fetch(more, timeout=_MORE_SECONDS)
        except nats.errors.TimeoutError:
            return messages
    return messages


def read_event(subject: str, data: bytes) -> event_pb2.RunEvent:
    """Parse a run event, and validate the fields that notifications use.

    Raises:
        PoisonEvent: The payload is not a RunEvent, an id or time is invalid, or the event's store is not the one in its
            subject.
    """
    try:
        event = event_pb2.RunEvent.FromString(data)
    except DecodeError:
        raise PoisonEvent("the payload is not a RunEvent") from None
    call = event.call_changed.call
    match event.WhichOneof("kind"):
        case "run_changed":
            ids = [event.run_id, event.conversation_id, event.run_changed.run.user_id]
        case "call_changed" if concerns_others(event):
            ids = [event.run_id, event.conversation_id, call.user_id, call.call_id, call.asked_user_id or call.user_id]
        case "starter_paused":
            ids = [event.starter_paused.user_id]
        case _:
            return event
    if not all(map(is_id, (event.event_id, event.store_id, *ids))):
        raise PoisonEvent("an id is missing or malformed")
    if subject.split(".")[2] != event.store_id:
        raise PoisonEvent("the event is on the subject of another store")
    try:
        event.time.ToDatetime()
        call.deadline_time.ToDatetime()
    except ValueError:
        raise PoisonEvent("a time is out of range") from None
    return event


# How often an event is delivered if the store refuses its values. Other failures are retried forever.
ATTEMPTS_MAX: Final = 8

_RETRY_SECONDS: Final = 1.0
_RETRY_SECONDS_MAX: Final = 30.0


Event = tuple[Message, event_pb2.RunEvent]


def _trace(message: Message) -> str:
    return valid((message.headers or {}).get(TRACEPARENT_KEY, ""))


class Intake:
    """Handles events in batches. An event that fails does not block the others."""

    def __init__(self, store: PostgresStore, counters: PrometheusCounters, *, on_new: Callable[[Added], None]) -> None:
        self._store = store
        self._counters = counters
        self._on_new = on_new

    async def take(self, messages: Sequence[Message]) -> None:
        """Make the notifications of these events durable, and then acknowledge the events.

        This is safe to cancel, because unacknowledged events are delivered again.
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
            notified = await self._notify([event for _, event in events], [_trace(message) for message, _ in events])
        except Unavailable:
            for message, _ in events:
                await self._retry(message)
        except Exception as error:  # noqa: BLE001  # one bad event must not stop the others
            if len(events) == 1:
                await self._postpone(events[0][0], error)
                return
            _log.warning("intake.batch_failed", events=len(events), exc_info=True)
            for one in events:
                await self._take([one])
        else:
            for (message, _), is_notified in zip(events, notified, strict=True):
                await message.ack()
                self._counters.events.labels("notified" if is_notified else "ignored").inc()

    async def _notify(self, events: Sequence[event_pb2.RunEvent], traces: Sequence[str]) -> list[bool]:
        """Write notifications and mark resolved needs. For each event, return whether it has a notification."""
        store_ids = {StoreId(event.store_id) for event in events if asks(event)}
        approvers = await self._store.approvers(store_ids) if store_ids else {}
        found = [drafts_of(event, approvers.get(StoreId(event.store_id), ())) for event in events]
        drafts = [[replace(each, traceparent=trace) for each in of] for of, trace in zip(found, traces, strict=True)]
        await self._add([draft for each in drafts for draft in each])
        if resolved := [over for event in events if (over := need_resolved_by(event)) is not None]:
            await self._store.mark_resolved(resolved)
        ends = [
            replace(end, traceparent=trace) if (end := job_end_of(event)) else None
            for event, trace in zip(events, traces, strict=True)
        ]
        conversations = {(end.inbox, end.conversation_id) for end in ends if end}
        # Only if the conversation is waiting for a user. Otherwise the model itself reports that its job has ended.
        waiting = await self._store.waiting(conversations) if conversations else frozenset()
        late = [end if end and (end.inbox, end.conversation_id) in waiting else None for end in ends]
        await self._add([end for end in late if end])
        return [bool(each) or end is not None for each, end in zip(drafts, late, strict=True)]

    async def _add(self, drafts: Sequence[Draft]) -> None:
        if drafts and (added := await self._store.add(drafts)).notifications:
            self._on_new(added)

    async def _postpone(self, message: Message, error: Exception) -> None:
        """Retry an event that failed when it was handled alone. Reject it only if its own values are at fault."""
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
