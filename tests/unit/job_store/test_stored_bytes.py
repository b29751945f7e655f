"""Counting the data of stores that have a limit, while the database fails for some of them (RES-3)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pawl.chassis.ids import StoreId
from pawl.job_store.ledger.ports import Limits
from pawl.job_store.ledger.rules.slots import SlotLimits
from pawl.job_store.store_settings.rules import Layer, Settings
from pawl.job_store.store_settings.snapshot import SettingsSnapshot
from pawl.job_store.sweeps import count_stored_bytes
from tests.fakes.manual_clock import VirtualClock, run_in_virtual_time

LIMIT = 10
COUNT_SECONDS = 4.0
STORES = [StoreId(name) for name in ("a", "b", "c")]


class Sizes:
    """Stores' sizes. A store without a size cannot be counted."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.counted_at = list[float]()
        self.seen = list[dict[StoreId, int]]()
        self.is_down = False
        limits = Limits(slots=SlotLimits(per_store=1, per_user=1))
        self.settings: Any = SettingsSnapshot(self, VirtualClock(), limits)  # type: ignore[arg-type]

    async def changed_layers(self, after_change: int) -> tuple[list[Settings], int]:
        return [Settings(layer=Layer.DEPLOYMENT, limits={"stored_bytes": LIMIT})][after_change:], 1

    async def stores(self) -> list[StoreId]:
        self.counted_at.append(asyncio.get_running_loop().time())
        if self.is_down:
            raise OSError
        return STORES

    async def stored_bytes(self, store_id: StoreId) -> int:
        self.seen.append(dict(self.settings.stored_bytes))
        await asyncio.sleep(COUNT_SECONDS)
        return self.sizes[store_id]

    async def count(self) -> list[StoreId]:
        """Count all stores once. Return the full ones."""
        await self.settings.refresh()
        await self.settings.count_stored_bytes()
        return [store_id for store_id in STORES if self.settings.limits_of(store_id).is_full]


def test_a_store_that_cannot_be_counted_keeps_its_last_size_and_delays_no_other() -> None:
    async def full() -> list[list[StoreId]]:
        sizes = Sizes(a=10, c=10)
        found = [await sizes.count()]
        assert sizes.seen[2] == {"a": 10}, "each size is known as soon as it is counted"
        sizes.sizes = {"a": 9, "b": 10, "c": 9}
        found.append(await sizes.count())
        sizes.sizes = {"a": 10}
        return [*found, await sizes.count()]

    assert run_in_virtual_time(full()) == [["a", "c"], ["b"], ["a", "b"]]


def test_a_failed_count_is_followed_by_the_same_pause_as_any_other() -> None:
    """The loop neither ends nor counts all stores again immediately."""

    async def times() -> list[float]:
        sizes = Sizes(a=1)
        await sizes.settings.refresh()
        loop = asyncio.create_task(count_stored_bytes(sizes.settings, VirtualClock()))
        await asyncio.sleep(1)
        sizes.is_down = True
        await asyncio.sleep(300)
        loop.cancel()
        start = asyncio.get_running_loop().time()
        await asyncio.wait([loop])
        assert loop.cancelled()
        assert asyncio.get_running_loop().time() == pytest.approx(start)
        return [at - sizes.counted_at[0] for at in sizes.counted_at]

    seconds = len(STORES) * COUNT_SECONDS
    assert run_in_virtual_time(times()) == pytest.approx([0, 21 * seconds, 21 * seconds + 30])
