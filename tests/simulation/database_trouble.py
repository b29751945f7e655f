"""Faults of the database server: clock jumps, and read-only periods after a failover."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from pawl.errors import DependencyUnavailable, Internal
from tests.simulation.record import Record
from tests.simulation.world import CHAOS_SECONDS, World

_JUMPS_SECONDS = (-1000.0, -130.0, -20.0, 20.0, 130.0, 250.0, 1000.0)
_READ_ONLY_SECONDS = (0.5, 2.0, 5.0, 15.0)


class DatabaseTrouble:
    """Causes database faults for a while, then leaves a working server. Its clock is not set back."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._server = world.tables.server
        self._draw = world.chance.stream("database trouble")
        # Adapters that do not recognise one of these errors treat it as an unexpected error.
        self._server.refusal = self._draw.choice([Internal, DependencyUnavailable])

    async def make(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + CHAOS_SECONDS
        while loop.time() < end:
            await asyncio.sleep(self._draw.expovariate(1 / 2.5))
            await self._one(end - loop.time())
        self._server.read_only = False

    async def _one(self, left: float) -> None:
        strikes, draw = self._world.chance.strikes, self._draw
        jump, seconds = draw.choice(_JUMPS_SECONDS), draw.choice(_READ_ONLY_SECONDS) * draw.random()
        if strikes(draw, "database clock jumped", 0.2):
            self._world.history.tell(f"database clock jumps by {jump:g}")
            self._server.ahead_seconds += jump
            self._world.history.set_back_seconds += max(0.0, -jump)
            self._world.history.jumps.append(asyncio.get_running_loop().time())
        if strikes(draw, "database read-only", 0.1):
            self._world.history.tell(f"database is read-only for {seconds:.2f}")
            self._server.read_only = True
            await asyncio.sleep(max(0.0, min(seconds, left)))
            self._server.read_only = False


def time_limits_use_real_time(record: Record) -> Iterator[str]:
    """LOOP-9: no run fails by a time limit before that time has really passed, even if the database clock jumps."""
    for run_id, run in record.runs.items():
        limits, log = run.options.limits, record.logs[run_id]
        most = {"RUN_TIMEOUT": limits.run_timeout_seconds, "ROUND_TIMEOUT": limits.round_timeout_seconds}
        if run.failure.reason not in most:
            continue
        begins = [event.seq for event in log if event.HasField("round_started")]
        since = max(begins, default=1) if run.failure.reason == "ROUND_TIMEOUT" else 1
        took = record.written_at(run_id, len(log)) - record.written_at(run_id, since)
        if took < most[run.failure.reason]:
            yield f"run {run_id} failed with {run.failure.reason} after {took:.1f} s"


CHECKERS = (time_limits_use_real_time,)
