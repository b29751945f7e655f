"""Jumps of the database clock."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from pawl.errors import DependencyUnavailable
from pawl.job_store.sweeps import watch_clock
from tests.fakes import virtual_time
from tests.fakes.virtual_time import VirtualClock


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
        assert virtual_time.run(sweep(*jumps)).brought_forward == seen, jumps


def test_a_response_that_is_read_late_is_not_a_backward_jump() -> None:
    """For example after the process was frozen: leases that were just renewed would end."""
    assert virtual_time.run(sweep(0.0, 0.0, answer_takes_seconds=20.0)).brought_forward == []
