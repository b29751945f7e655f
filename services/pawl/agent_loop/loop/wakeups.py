"""Hints from NATS that there is something to do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pawl.chassis.bus.connection import Bus
from pawl.chassis.ids import RunId, RunKey, StoreId, WorkerId


class BusWakeups:
    """`Wakeups` of the bus: without it, none come."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def subscribe(
        self,
        worker_id: WorkerId,
        *,
        on_work: Callable[[], Awaitable[None]],
        on_command: Callable[[RunKey], Awaitable[None]],
    ) -> None:
        async def work(_subject: str, _data: bytes) -> None:
            await on_work()

        async def command(_subject: str, data: bytes) -> None:
            store_id, _, run_id = data.decode(errors="replace").partition("/")
            await on_command(RunKey(StoreId(store_id), RunId(run_id)))

        await self._bus.subscribe("pawl.internal.v1.work", work)
        await self._bus.subscribe(f"pawl.internal.v1.worker.{worker_id}", command)
