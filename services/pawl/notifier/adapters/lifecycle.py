"""The life cycle of all runs, from JetStream.

One durable pull consumer, shared by all replicas: each event goes to one of
them, and to another if it is not answered within 10 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Final

import nats.errors
import nats.js.errors
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from pawl.chassis import logs
from pawl.chassis.bus import Bus
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId, is_id
from pawl.errors import DependencyUnavailable
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.notifier.app.ports import Delivery, PoisonEvent
from pawl.notifier.domain.announcement import ApprovalAsked, Change, Over, RunChange, StarterPaused
from pawl.notifier.domain.notification import EventId, Inbox
from pawl.values import WaitKind

STREAM: Final = "PAWL_LIFECYCLE"
CONSUMER: Final = "notifier"
SUBJECTS: Final = "pawl.v1.*.lifecycle.*"

_BATCH: Final = 64
_WAIT_SECONDS: Final = 20.0
# What is known to be pending comes at once, unless another replica was quicker.
_MORE_SECONDS: Final = 0.05
_PAUSE_SECONDS: Final = 1.0
_ACK_WAIT_SECONDS: Final = 10.0
_UNANSWERED_MAX: Final = 1000

_KNOWN_WAITS: Final = frozenset(map(int, WaitKind))

_log = logs.get_logger(__name__)


class JetStreamLifecycle:
    """Hands events to `take`, many at a time, for as long as the bus is connected."""

    def __init__(self, bus: Bus, take: Callable[[Sequence[Delivery]], Awaitable[None]]) -> None:
        self._bus = bus
        self._take = take

    def start(self) -> None:
        """Consume from now on, on this connection of the bus and all later ones."""
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
                        await self._take([JetStreamDelivery(message) for message in messages])
            except (nats.errors.Error, OSError, TimeoutError, DependencyUnavailable) as error:
                # The stream is not there yet, or it was wiped, and the consumer with it.
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
                # JetStream hides a message that was delivered too often. Giving up is the intake's decision.
                max_deliver=-1,
                max_ack_pending=_UNANSWERED_MAX,
                filter_subject=SUBJECTS,
            ),
        )
        return await jetstream.pull_subscribe_bind(durable=CONSUMER, stream=STREAM)


async def _fetch(subscription: JetStreamContext.PullSubscription) -> list[Msg]:
    """Return what there is, up to a batch; nothing after a while without events.

    A fetch of many waits for the last of them, so the first is fetched alone.
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


class JetStreamDelivery:
    """See `ports.Delivery`."""

    def __init__(self, message: Msg) -> None:
        self._message = message

    @property
    def attempt(self) -> int:
        return self._message.metadata.num_delivered

    def read(self) -> Change | None:
        return read_change(self._message.subject, self._message.data)

    async def accept(self) -> None:
        await self._message.ack()

    async def retry(self, *, delay_seconds: float) -> None:
        await self._message.nak(delay=delay_seconds)

    async def reject(self) -> None:
        await self._message.term()


def read_change(subject: str, data: bytes) -> Change | None:
    """Return what a message of the life cycle tells, or None if that is no change of a run, and of no approval.

    Raises:
        PoisonEvent: the bytes are no RunEvent, an id is none, or the event belongs
            to another store than its subject says.
    """
    try:
        event = event_pb2.RunEvent.FromString(data)
    except DecodeError:
        raise PoisonEvent("the payload is no RunEvent") from None
    match event.WhichOneof("kind"):
        case "run_changed":
            return _run_change(event, _time(subject, event, event.run_changed.run.user_id))
        case "call_changed" if event.call_changed.call.state == call_pb2.CALL_STATE_AWAITING_APPROVAL:
            call = event.call_changed.call
            return _approval_asked(event, _time(subject, event, call.user_id, call.call_id))
        case "call_changed" if event.call_changed.from_state == call_pb2.CALL_STATE_AWAITING_APPROVAL:
            call_id = event.call_changed.call.call_id
            return Over(
                time=_time(subject, event, call_id),
                store_id=StoreId(event.store_id),
                run_id=RunId(event.run_id),
                call_id=CallId(call_id),
            )
        case "starter_paused":
            paused = event.starter_paused
            return StarterPaused(
                event_id=EventId(event.event_id),
                time=_time(subject, event, paused.user_id),
                inbox=Inbox(store_id=StoreId(event.store_id), user_id=UserId(paused.user_id)),
                starter=event.type.partition(".")[0],
                name=paused.name,
                note=paused.note,
            )
        case _:
            return None


def _time(subject: str, event: event_pb2.RunEvent, *ids: str) -> datetime:
    """Return when an event happened, once its ids, and others that it names, are checked."""
    of_run = () if event.HasField("starter_paused") else (event.run_id, event.conversation_id)
    if not all(map(is_id, (event.event_id, event.store_id, *of_run, *ids))):
        raise PoisonEvent("an id is missing or malformed")
    if subject.split(".")[2] != event.store_id:
        raise PoisonEvent("the event is on the subject of another store")
    return _utc(event.time)


def _utc(time: Timestamp) -> datetime:
    try:
        return time.ToDatetime(tzinfo=UTC)
    except ValueError:
        raise PoisonEvent("the time is out of range") from None


def _approval_asked(event: event_pb2.RunEvent, time: datetime) -> ApprovalAsked:
    call = event.call_changed.call
    return ApprovalAsked(
        event_id=EventId(event.event_id),
        time=time,
        store_id=StoreId(event.store_id),
        user_id=UserId(call.user_id),
        run_id=RunId(event.run_id),
        call_id=CallId(call.call_id),
        conversation_id=ConversationId(event.conversation_id),
        tool_name=call.tool_name,
        preview=call.approval.preview or call.approval.cause,
        approved_by=frozenset(UserId(approval.user_id) for approval in call.approval.approvals),
        escalated=call.approval.escalated,
        expire_time=_utc(call.deadline_time) if call.HasField("deadline_time") else None,
    )


def _run_change(event: event_pb2.RunEvent, time: datetime) -> RunChange:
    run = event.run_changed.run
    return RunChange(
        event_id=EventId(event.event_id),
        type=event.type,
        time=time,
        inbox=Inbox(store_id=StoreId(event.store_id), user_id=UserId(run.user_id)),
        run_id=RunId(event.run_id),
        conversation_id=ConversationId(event.conversation_id),
        waits=frozenset(WaitKind(wait) for wait in run.waits if wait in _KNOWN_WAITS),
        superseded=run.stop_cause == run_pb2.STOP_CAUSE_SUPERSEDED,
        ended_by_operator=run.stop_cause == run_pb2.STOP_CAUSE_OPERATOR,
        quarantined=run.attention.reason == run_pb2.ATTENTION_REASON_QUARANTINED,
        failure_message=run.failure.message,
        output_text=run.output_text,
        does_call=bool(run.parent_run_id or run.reports_to_conversation_id),
        is_turn=run.generation > 0,
        job=run.job.tool_name,
        reports_to=ConversationId(_heard_by(run)),
    )


def _heard_by(run: run_pb2.Run) -> str:
    """Return the conversation that is told of the end of a job; empty if none is."""
    return "" if run.job.reports == run_pb2.JOB_REPORTS_NONE else run.reports_to_conversation_id
