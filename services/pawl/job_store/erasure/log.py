"""Erasing on JetStream: the life cycle of erased runs, and the list of what was erased, which outlives the database.

The list has ids only. Whoever hears `pawl.v1.<store>.erased.<conversation>` can erase what it has kept, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from pawl.chassis.bus.connection import Bus
from pawl.chassis.ids import ConversationId, StoreId
from pawl.errors import DependencyUnavailable
from pawl.job_store.erasure.rules import ErasureKey
from pawl.job_store.lifecycle import stream as lifecycle_stream

STREAM: Final = "PAWL_ERASED"
SUBJECTS: Final = "pawl.v1.*.erased.*"

_BYTES_MAX: Final = 256 * 1024 * 1024
_BATCH: Final = 256
_SECONDS: Final = 5.0
# A consumer that nobody asks any more goes by itself.
_IDLE_SECONDS: Final = 30.0
_CONFIG: Final = StreamConfig(
    name=STREAM,
    subjects=[SUBJECTS],
    retention=RetentionPolicy.LIMITS,
    storage=StorageType.FILE,
    max_bytes=_BYTES_MAX,
    max_msgs_per_subject=1,
)


class JetStreamErasures:
    """The life cycle on NATS, from which erased runs are removed, and beside it the list of what was erased.

    All methods raise DependencyUnavailable while it is unavailable.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._opened_number = self._applied_number = 0

    async def open(self) -> bool | None:
        """Make sure that the list exists; True if it is new, None if it was applied and is the same since.

        It is read on each new connection, which may be to another server.
        """
        connection_number = self._bus.connection_number
        if self._applied_number == connection_number and self._bus.connected:
            return None
        with _translating():
            info = await lifecycle_stream.put_stream(self._bus.jetstream(), _CONFIG)
        self._opened_number = connection_number
        return info.state.messages == 0

    def applied(self) -> None:
        """Take the list for applied, as it was opened."""
        self._applied_number = self._opened_number

    async def read(self) -> AsyncIterator[Collection[tuple[StoreId, ConversationId]]]:
        """Yield what was ever erased, in parts."""
        with _translating():
            async for messages in _scan(self._bus.jetstream(), STREAM, SUBJECTS):
                places = [message.subject.split(".") for message in messages]
                yield [(StoreId(place[2]), ConversationId(place[4])) for place in places]

    async def write(self, key: ErasureKey) -> None:
        """Add a conversation. Durable when it returns; more than once does no harm."""
        with _translating():
            subject = f"pawl.v1.{key.store_id}.erased.{key.conversation_id}"
            await self._bus.jetstream().publish(subject, b"", timeout=_SECONDS, stream=STREAM)

    async def purge(self, store_id: StoreId, run_ids: Collection[str]) -> int:
        """Remove the life cycle of some runs; returns how many messages."""
        count = 0
        with _translating():
            jetstream = self._bus.jetstream()
            async for messages in _scan(jetstream, lifecycle_stream.STREAM, f"pawl.v1.{store_id}.lifecycle.*"):
                for message in messages:
                    if (message.headers or {}).get("ce-subject") in run_ids:
                        # The server writes over it.
                        await jetstream.delete_msg(lifecycle_stream.STREAM, message.metadata.sequence.stream)
                        count += 1
        return count


async def _scan(jetstream: JetStreamContext, stream: str, subject: str) -> AsyncIterator[Sequence[Msg]]:
    """Yield the messages on a subject that a stream has now, without their payloads; none if there is no stream."""
    config = ConsumerConfig(
        deliver_policy=DeliverPolicy.ALL,
        ack_policy=AckPolicy.NONE,
        headers_only=True,
        inactive_threshold=_IDLE_SECONDS,
        mem_storage=True,
    )
    try:
        subscription = await jetstream.pull_subscribe(subject, stream=stream, config=config)
    except NotFoundError:
        return
    try:
        pending = (await subscription.consumer_info()).num_pending or 0
        while pending > 0:
            messages = await subscription.fetch(min(pending, _BATCH), timeout=_SECONDS)
            pending -= len(messages)
            yield messages
    finally:
        await subscription.unsubscribe()


@contextmanager
def _translating() -> Iterator[None]:
    try:
        yield
    except (nats.errors.Error, OSError, TimeoutError) as error:
        raise DependencyUnavailable(f"NATS: {type(error).__name__}") from error
