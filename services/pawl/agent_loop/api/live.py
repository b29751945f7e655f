from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
from google.protobuf.message import DecodeError

from pawl.chassis.ids import ConversationId, RunId, StoreId, UserId
from pawl.chassis.process import logs
from pawl.event.v1.event_pb2 import RunEvent
from pawl.job.v1.ledger_pb2 import EncodedEvents
from pawl.server.bus.connection import Bus
from pawl.server.bus.outbox import Subscription

_INBOXES: Final = "pawl.internal.v1.inboxes"
_CONVERSATIONS: Final = "pawl.internal.v1.conversations"
_VIEWERS: Final = "pawl.internal.v1.viewers"
_VIEWERS_MAX: Final = 1000

_log = logs.get_logger(__name__)


class BusEvents:
    """Receives live run events from NATS. Events may be lost or duplicated."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    @property
    def connected(self) -> bool:
        return self._bus.connected

    async def subscribe(
        self, store_id: StoreId, run_id: RunId, take: Callable[[Sequence[bytes], RunEvent], Awaitable[None]]
    ) -> Subscription:
        """Call `take` with each batch of consecutive encoded events and the batch's last event in decoded form."""

        async def deliver(subject: str, data: bytes) -> None:
            try:
                events = EncodedEvents.FromString(data).events
                last = RunEvent.FromString(events[-1])
            except (DecodeError, IndexError):
                _log.warning("live.garbled", subject=subject)
                return
            # The subject is only an address. Trust only the run id in the event.
            if last.store_id == store_id and last.run_id == run_id:
                await take(events, last)

        return await self._bus.subscribe(f"pawl.v1.{store_id}.run.{run_id}.events", deliver)

    async def subscribe_inboxes(self, changed: Callable[[StoreId, UserId], None]) -> Subscription:
        """Until unsubscribed, call `changed` whenever a user's pending items may have changed."""
        return await self._subscribe_pairs(_INBOXES, changed)

    async def subscribe_conversations(self, changed: Callable[[StoreId, ConversationId], None]) -> Subscription:
        """Until unsubscribed, call `changed` whenever a conversation changes.

        New output of its runs does not count as a change.
        """
        return await self._subscribe_pairs(_CONVERSATIONS, changed)

    async def _subscribe_pairs(self, subject: str, changed: Callable[[StoreId, Any], None]) -> Subscription:
        async def deliver(subject: str, data: bytes) -> None:
            try:
                pairs = msgspec.json.decode(data, type=list[tuple[StoreId, str]])
            except msgspec.MsgspecError:
                _log.warning("live.garbled", subject=subject)
                return
            for store_id, id_ in pairs:
                changed(store_id, id_)

        return await self._bus.subscribe(subject, deliver)

    async def report_viewers(self, viewers: Sequence[tuple[StoreId, UserId, RunId]]) -> None:
        """Report which runs users have seen, so that they are not notified about those runs. Best effort."""
        for first in range(0, len(viewers), _VIEWERS_MAX):
            await self._bus.publish(_VIEWERS, msgspec.json.encode(viewers[first : first + _VIEWERS_MAX]))
