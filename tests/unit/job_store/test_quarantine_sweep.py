"""A run is quarantined for a worker that is gone, never for a clock of the database that jumped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.ids import RunId, RunKey, StoreId
from pawl.chassis.metrics import Metrics
from pawl.job_store.adapters.metrics import PrometheusMeter
from pawl.job_store.app.sweeps import QuarantineSweep
from pawl.job_store.domain.attention import GRACE, Quarantine, Silence
from tests.fakes import virtual_time
from tests.unit.job_store.world import World

CRASHES_MAX = 3
LEASE_SECONDS = 30.0
RENEW_SECONDS = 2.0
END = 100.0


class Database:
    """A run at its last chance, with a worker that renews its lease until it dies."""

    def __init__(self, *, worker_dies_at: float) -> None:
        self.world = World()
        self.run_id = self.world.begin()
        for crashes in (1, 2):
            self.world.advance(30)
            self.world.claim(self.run_id, f"w{crashes + 1}")
        self._worker_dies_at = worker_dies_at
        self._began = self._seen = asyncio.get_running_loop().time()
        self.quarantined_at: float | None = None

    @property
    def seconds(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    def jump(self, seconds: float) -> None:
        self.world.advance(seconds)

    def tick(self) -> None:
        now = asyncio.get_running_loop().time()
        self.world.advance(now - self._seen)
        self._seen = now

    async def renew(self) -> None:
        while self.seconds < self._worker_dies_at:
            self.tick()
            run = self.world.run(self.run_id)
            if run.is_quarantined:
                return
            lease_end = self.world.now + timedelta(seconds=LEASE_SECONDS)
            self.world.unit.put_run(replace(run, claim_at=lease_end))
            await asyncio.sleep(RENEW_SECONDS)

    async def doomed(self) -> Sequence[RunKey]:
        self.tick()
        run = self.world.run(self.run_id)
        is_doomed = run.worker_id is not None and run.claim_at is not None and run.claim_at <= self.world.now
        return [run.key] if is_doomed else []

    async def quarantine(self, runs: Sequence[RunKey]) -> int:
        self.tick()
        count: int = self.world.apply(Quarantine(runs=runs, crashes_max=CRASHES_MAX)) if runs else 0
        if count:
            self.quarantined_at = self.seconds
        return count


async def play(worker_dies_at: float, jumps: Sequence[tuple[float, float]]) -> Database:
    """The sweep beside a worker, with jumps of the database's clock."""
    database = Database(worker_dies_at=worker_dies_at)
    ledger: Any = database
    sweep = QuarantineSweep(ledger, PrometheusMeter(Metrics("test")), virtual_time.VirtualClock())

    async def jump() -> None:
        for at, seconds in sorted(jumps):
            await asyncio.sleep(max(0.0, at - database.seconds))
            database.jump(seconds)

    tasks = [asyncio.ensure_future(task) for task in (database.renew(), sweep.run(), jump())]
    with suppress(TimeoutError):
        async with asyncio.timeout(END):
            await asyncio.Event().wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return database


JUMPS = st.lists(st.tuples(st.floats(0, END), st.floats(0, 5000)), max_size=12)


@settings(max_examples=150, deadline=None)
@given(JUMPS)
def test_a_run_whose_worker_renews_its_lease_is_not_quarantined(jumps: list[tuple[float, float]]) -> None:
    database = virtual_time.run(play(END, jumps))
    assert database.quarantined_at is None
    assert not database.world.run(database.run_id).is_quarantined


@settings(max_examples=150, deadline=None)
@given(st.floats(0, 60), JUMPS)
def test_a_run_whose_worker_is_gone_is_quarantined_soon(dies_at: float, jumps: list[tuple[float, float]]) -> None:
    database = virtual_time.run(play(dies_at, jumps))
    assert database.quarantined_at is not None
    assert dies_at <= database.quarantined_at <= dies_at + LEASE_SECONDS + GRACE.total_seconds() + 3


def test_looks_begin_anew_after_a_pause() -> None:
    """While the database was away, no worker could renew its lease."""
    key = RunKey(StoreId("store"), RunId("run"))
    silence = Silence()
    for now in (0.0, 1.0, 2.0, 3.0):
        silence = silence.after([key], now)
    assert silence.after([key], 20.0).believed == ()
    for now in (4.0, 5.0):
        silence = silence.after([key], now)
    assert silence.believed == (key,)


def test_a_lease_that_was_renewed_in_between_begins_anew() -> None:
    key, silence = RunKey(StoreId("store"), RunId("run")), Silence()
    for now in range(20):
        silence = silence.after([] if now % 4 == 0 else [key], float(now))
        assert silence.believed == ()
