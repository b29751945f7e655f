"""The life cycle of all runs, from JetStream.

One durable pull consumer, shared by all replicas: each event goes to one of
them, and to another if it is not answered within 10 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import nats.errors
import nats.js.errors
from google.protobuf.message import DecodeError
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from pawl.chassis.bus.connection import Bus
from pawl.chassis.ids import is_id
from pawl.chassis.process import logs
from pawl.errors import DependencyUnavailable
from pawl.event.v1 import event_pb2
from pawl.notifier.inbox.announcement import concerns_approval
from pawl.notifier.inbox.rules import PoisonEvent

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

Message: TypeAlias = Msg
"""An event of the life cycle, to be answered exactly once. Unanswered, it comes again."""

_log = logs.get_logger(__name__)


class JetStreamLifecycle:
    """Hands events to `take`, many at a time, for as long as the bus is connected."""

    def __init__(self, bus: Bus, take: Callable[[Sequence[Message]], Awaitable[None]]) -> None:
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
                        await self._take(messages)
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


def read_event(subject: str, data: bytes) -> event_pb2.RunEvent:
    """Return a message of the life cycle, checked as far as anybody is told of it.

    Raises:
        PoisonEvent: the bytes are no RunEvent, an id or a time is none, or the event belongs
            to another store than its subject says.
    """
    try:
        event = event_pb2.RunEvent.FromString(data)
    except DecodeError:
        raise PoisonEvent("the payload is no RunEvent") from None
    call = event.call_changed.call
    match event.WhichOneof("kind"):
        case "run_changed":
            ids = [event.run_id, event.conversation_id, event.run_changed.run.user_id]
        case "call_changed" if concerns_approval(event):
            ids = [event.run_id, event.conversation_id, call.user_id, call.call_id]
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
