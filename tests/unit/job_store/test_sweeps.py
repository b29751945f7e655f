"""Sweeps: jumps of the database clock, silent workers, and the erasure log, which is retried until applied (I22)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from pawl.chassis.ids import RunId, RunKey, StoreId
from pawl.errors import DependencyUnavailable
from pawl.job_store.erasure.erasing import JetStreamErasures
from pawl.job_store.ledger.rules.attention import Silence
from pawl.job_store.sweeps import watch_clock
from tests.fakes.manual_clock import VirtualClock, run_in_virtual_time


class JumpingDatabase:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.ahead_seconds = 0.0
        self.brought_forward: list[float] = []
        self.is_away = False
        self.answer_takes_seconds = 0.0
        self.seen_time = self.time

    @property
    def time(self) -> datetime:
        return datetime.fromtimestamp(self.clock.now() + self.ahead_seconds, UTC)

    async def times(self) -> tuple[datetime, datetime]:
        if self.is_away:
            raise DependencyUnavailable
        answer = self.time, self.seen_time
        self.seen_time = max(answer)
        await asyncio.sleep(self.answer_takes_seconds)
        return answer

    async def bring_forward(self, seconds: float) -> int:
        self.brought_forward.append(round(seconds, 3))
        self.seen_time = self.time
        return 0


async def sweep(*jumps: float, answer_takes_seconds: float = 0.0) -> JumpingDatabase:
    database = JumpingDatabase()
    sweeping = asyncio.create_task(watch_clock(database, database.clock))
    await asyncio.sleep(5.5)
    for jump in jumps:
        database.ahead_seconds += jump
        database.answer_takes_seconds = answer_takes_seconds
        await asyncio.sleep(5.5 + answer_takes_seconds)
    sweeping.cancel()
    return database


def test_only_a_backward_clock_jump_moves_runs_to_an_earlier_time() -> None:
    for jumps, seen in (((-130.0,), [130.0]), ((-130.0, 130.0, -60.0), [130.0, 60.0]), ((130.0,), []), ((-1.0,), [])):
        assert run_in_virtual_time(sweep(*jumps)).brought_forward == seen, jumps


def test_a_response_that_is_read_late_is_not_a_backward_jump() -> None:
    """If the process was frozen, leases that were just renewed must not end."""
    assert run_in_virtual_time(sweep(0.0, 0.0, answer_takes_seconds=20.0)).brought_forward == []


def test_a_gap_between_polls_restarts_the_silence_count() -> None:
    """While the database was unavailable, no worker could renew its lease."""
    key = RunKey(StoreId("store"), RunId("run"))
    silence = Silence()
    for now in (0.0, 1.0, 2.0, 3.0):
        silence = silence.after([key], now)
    assert silence.after([key], 20.0).confirmed == ()
    for now in (4.0, 5.0):
        silence = silence.after([key], now)
    assert silence.confirmed == (key,)


def test_a_renewed_lease_resets_the_silence() -> None:
    key, silence = RunKey(StoreId("store"), RunId("run")), Silence()
    for now in range(20):
        silence = silence.after([] if now % 4 == 0 else [key], float(now))
        assert silence.confirmed == ()


class Bus:
    connected = True
    connection_number = 1

    def jetstream(self) -> Any:
        return self

    async def update_stream(self, _config: object) -> Any:
        return SimpleNamespace(state=SimpleNamespace(messages=0))


async def test_the_erasure_log_is_read_until_it_was_applied() -> None:
    bus = Bus()
    log = JetStreamErasures(bus)  # type: ignore[arg-type]  # only these methods are used
    assert [await log.open(), await log.open()] == [True, True]
    log.applied()
    assert await log.open() is None


async def test_the_erasure_log_is_read_again_on_a_new_connection() -> None:
    bus = Bus()
    log = JetStreamErasures(bus)  # type: ignore[arg-type]  # only these methods are used
    await log.open()
    bus.connection_number = 2
    log.applied()
    assert await log.open() is True
