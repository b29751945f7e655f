"""Publishes live events and wake-ups on core NATS: best effort, at most once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from pawl.chassis.bus.connection import Bus
from pawl.chassis.ids import RunKey, StoreId, UserId
from pawl.chassis.rpc.parts import in_parts
from pawl.job_store.ledger.ports import LiveEvent
from pawl.job_store.ledger.rules.unit_of_work import Wakeup

WORK_SUBJECT: Final = "pawl.internal.v1.work"

# NATS accepts 1 MiB by default. A larger event is sent alone.
_MESSAGE_BYTES_MAX: Final = 512 * 1024
# Key of the first field of RunEvents: number 1, wire type 2.
_EVENTS_FIELD: Final = b"\x0a"


class NatsAnnouncer:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def publish(self, events: Sequence[LiveEvent]) -> None:
        for run, payloads in _by_run(events).items():
            # Build RunEvents messages from the stored event bytes.
            entries = (_EVENTS_FIELD + _varint(len(payload)) + payload for payload in payloads)
            for part in in_parts(entries, len, size_max=_MESSAGE_BYTES_MAX):
                await self._bus.publish(f"pawl.v1.{run.store_id}.run.{run.run_id}.events", b"".join(part))

    async def wake(self, wakeups: Sequence[Wakeup]) -> None:
        for wakeup in dict.fromkeys(wakeups):
            payload = f"{wakeup.run.store_id}/{wakeup.run.run_id}".encode()
            await self._bus.publish(f"pawl.internal.v1.worker.{wakeup.worker_id}", payload)

    async def work_ready(self) -> None:
        await self._bus.publish(WORK_SUBJECT, b"")

    async def inboxes_changed(self, inboxes: Collection[tuple[StoreId, UserId]]) -> None:
        await self._bus.publish("pawl.internal.v1.inboxes", msgspec.json.encode(sorted(inboxes)))


def _by_run(events: Sequence[LiveEvent]) -> dict[RunKey, list[bytes]]:
    runs: dict[RunKey, list[bytes]] = {}
    for event in events:
        runs.setdefault(RunKey(event.store_id, event.run_id), []).append(event.payload)
    return runs


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number >> 7:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)
