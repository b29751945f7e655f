"""Publishes live events and wake-ups on core NATS. Delivery is best effort, at most once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from pawl.chassis.ids import ConversationId, StoreId, UserId
from pawl.job_store.ledger.ports import LogRow
from pawl.job_store.ledger.rules.unit_of_work import Wakeup
from pawl.server.bus.connection import Bus

WORK_SUBJECT: Final = "pawl.internal.v1.work"


class NatsAnnouncer:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def publish(self, events: Sequence[LogRow]) -> None:
        for row in events:
            await self._bus.publish(f"pawl.v1.{row.store_id}.run.{row.run_id}.events", row.events)

    async def wake(self, wakeups: Sequence[Wakeup]) -> None:
        for wakeup in dict.fromkeys(wakeups):
            payload = f"{wakeup.run.store_id}/{wakeup.run.run_id}".encode()
            await self._bus.publish(f"pawl.internal.v1.worker.{wakeup.worker_id}", payload)

    async def work_ready(self) -> None:
        await self._bus.publish(WORK_SUBJECT, b"")

    async def inboxes_changed(self, inboxes: Collection[tuple[StoreId, UserId]]) -> None:
        await self._bus.publish("pawl.internal.v1.inboxes", msgspec.json.encode(sorted(inboxes)))

    async def conversations_changed(self, conversations: Collection[tuple[StoreId, ConversationId]]) -> None:
        await self._bus.publish("pawl.internal.v1.conversations", msgspec.json.encode(sorted(conversations)))
