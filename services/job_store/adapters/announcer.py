"""Live events and wake-ups on core NATS: best effort, at most once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from services.chassis.bus import Bus
from services.job_store.app.ports import LiveEvent
from services.job_store.domain.book import Poke

WORK_SUBJECT: Final = "pawl.internal.v1.work"


class NatsAnnouncer:
    """See `ports.Announcer`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def publish(self, events: Sequence[LiveEvent]) -> None:
        for event in events:
            await self._bus.publish(f"pawl.v1.{event.store_id}.run.{event.run_id}.events", event.payload)

    async def poke(self, pokes: Sequence[Poke]) -> None:
        for poke in dict.fromkeys(pokes):
            payload = f"{poke.store_id}/{poke.run_id}".encode()
            await self._bus.publish(f"pawl.internal.v1.worker.{poke.worker_id}", payload)

    async def work_ready(self) -> None:
        await self._bus.publish(WORK_SUBJECT, b"")
