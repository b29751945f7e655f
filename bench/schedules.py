"""P13: 100,000 schedules, 500 of which are due in the same second, with two replicas of agent-loop and of job-store.

It measures the delay of the last run, whether each run is created exactly once, and the duration of StartRun in the
following five seconds compared with its normal duration. The worker, a separate process, is stopped during this time,
because a small machine cannot do 500 concurrent runs even without schedules. The figures with the worker are also
shown. The due schedules belong to 500 users in 50 stores.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from bench import load
from bench.database import connect
from bench.figures import Figure, NotMeasured, at_most
from bench.load import Outcome
from bench.options import Options
from bench.overload import DEFAULT_LIMITS, STORES, place
from bench.percentiles import percentile
from bench.subjects import Pawl
from bench.world import pawl
from pawl.agent.v1 import schedule_pb2 as pb
from pawl.agent.v1.schedule_pb2_grpc import ScheduleServiceStub
from pawl.event.v1 import schedule_pb2

_SCHEDULES: Final = 100_000
_DUE: Final = 500
_OF_A_USER: Final = 100
# Coprime with the number of stores, so that all of them get some of the schedules.
_STEP: Final = 199
_SECONDS_MAX: Final = 5.0
_TIMES_P99_MAX: Final = 2.0
_RATE: Final = 20.0
_AHEAD_SECONDS: Final = 2.0
_PATIENCE_SECONDS: Final = 60.0
_LABEL: Final = "scheduled"

# Copies of one schedule. Each user has a hundred of them, which are due in the course of the next year.
_COPY: Final = """
INSERT INTO job_store.schedules
SELECT (r).*
FROM job_store.schedules AS s, generate_series(1, $1::int) AS n, jsonb_populate_record(s, jsonb_build_object(
    'store_id', 'store-' || n % $2::int, 'user_id', 'sleeper-' || n / $3::int, 'schedule_id', 'sch_' || n,
    'name', 'n' || n, 'due_time', now() + interval '1 hour' + n * interval '5 minutes',
    'claim_at', now() + interval '1 hour' + n * interval '5 minutes'
)) AS r
"""
# One schedule for each of this many users, due at the same time.
_MAKE_DUE: Final = """
UPDATE job_store.schedules SET user_id = 'user-' || substr(schedule_id, 5), due_time = $2, claim_at = $2
WHERE schedule_id IN (SELECT 'sch_' || n * $3 FROM generate_series(1, $1::int) AS n)
"""
_MADE: Final = """
SELECT count(*) AS runs, count(DISTINCT user_id) AS users, extract(epoch FROM max(create_time) - $2)::float8 AS seconds
FROM job_store.runs WHERE labels LIKE '%' || $1 || '%' AND create_time >= $2
"""


@dataclass(slots=True, kw_only=True)
class _Seen:
    """Outcomes of StartRun before and during bursts, the bursts' durations, and missing or duplicate runs."""

    quiet: list[Outcome] = field(default_factory=list)
    beside: list[Outcome] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    wrong: int = 0

    @property
    def times(self) -> float:
        return self._milliseconds(self.beside, 0.99) / self._milliseconds(self.quiet, 0.99)

    @property
    def detail(self) -> dict[str, float]:
        return {
            "otherwise p50, ms": self._milliseconds(self.quiet, 0.5),
            "otherwise p99, ms": self._milliseconds(self.quiet, 0.99),
            "meanwhile p50, ms": self._milliseconds(self.beside, 0.5),
            "meanwhile p99, ms": self._milliseconds(self.beside, 0.99),
            "samples of each": float(min(len(self.quiet), len(self.beside))),
        }

    @staticmethod
    def _milliseconds(outcomes: Sequence[Outcome], share: float) -> float:
        return percentile([one.acknowledged_seconds * 1000 for one in outcomes], share)


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Repeatedly make many schedules due at the same time, while StartRun is called at a constant rate."""
    replicas = {"agent-loop": 3, "job-store": 2}
    async with pawl(environment=DEFAULT_LIMITS, is_split=True, replicas=replicas) as (subject, _):
        await load.warm_up(subject.agents, place)
        await _schedules(subject)
        worker = subject.processes()["agent-loop/1"]
        alone = _Seen()
        for _ in range(options.count(6, 2)):
            os.kill(worker, signal.SIGSTOP)
            try:
                await _burst(subject, alone)
            finally:
                os.kill(worker, signal.SIGCONT)
            await _rest(subject)
        driven = _Seen()
        for _ in range(options.count(3, 1)):
            await _burst(subject, driven)
            await _rest(subject)
    if refused := load.refusals([*alone.quiet, *alone.beside]):
        return [NotMeasured(code="P13", why=f"runs were refused: {refused}")]
    took = [*alone.took, *driven.took]
    last = f"{_DUE} of {_SCHEDULES} schedules due in the same second: delay of the last run, slowest burst"
    times = "StartRun acknowledged during the burst, p99, relative to its normal p99"
    detail = {"fastest time, s": min(took), "times": float(len(took))}
    return [
        at_most(_SECONDS_MAX, code="P13", what=last, value=max(took), unit="s", detail=detail),
        at_most(
            0,
            code="P13",
            what="missing or duplicate runs of these",
            value=float(alone.wrong + driven.wrong),
            unit="",
        ),
        at_most(_TIMES_P99_MAX, code="P13", what=times, value=alone.times, unit="", detail=alone.detail),
        Figure(
            code="P13",
            what=f"{times}, with a worker that drives the runs on the same cores",
            value=driven.times,
            unit="",
            detail=driven.detail,
        ),
    ]


async def _schedules(subject: Pawl) -> None:
    """Create one schedule as its user would, and copies of it."""
    definition = schedule_pb2.ScheduleDefinition(
        name="copied", text="Look up three items.", cron="0 9 * * *", time_zone="Europe/Berlin", labels={_LABEL: "it"}
    )
    scheduler = ScheduleServiceStub(subject.channel)
    await scheduler.CreateSchedule(pb.CreateScheduleRequest(definition=definition), metadata=place(0).metadata)
    async with connect(subject.suite) as connection:
        await connection.execute(_COPY, _SCHEDULES, STORES, _OF_A_USER, timeout=_PATIENCE_SECONDS)
        await connection.execute("DELETE FROM job_store.schedules WHERE name = 'copied'")
        await connection.execute("ANALYZE job_store.schedules")


async def _starts(subject: Pawl, seconds: float) -> list[Outcome]:
    async def start(number: int, due: float) -> Outcome:
        return (await load.start(subject.agents, place(number), due))[0]

    return await load.at_rate(_RATE, seconds, start)


async def _burst(subject: Pawl, seen: _Seen) -> None:
    """Make schedules due soon, and measure their runs, and StartRun before and after the due time."""
    seen.quiet += await _starts(subject, _SECONDS_MAX)
    async with connect(subject.suite) as connection:
        due = await connection.fetchval("SELECT date_trunc('second', now()) + $1 * interval '1 second'", _AHEAD_SECONDS)
        await connection.execute(_MAKE_DUE, _DUE, due, _STEP)
        ahead = await connection.fetchval("SELECT extract(epoch FROM $1 - clock_timestamp())::float8", due)
    await asyncio.sleep(ahead)
    seen.beside += await _starts(subject, _SECONDS_MAX)
    runs, users, seconds = await _made(subject, due)
    seen.took.append(seconds)
    seen.wrong += _DUE - users + runs - users


async def _made(subject: Pawl, due: object) -> tuple[int, int, float]:
    """Return how many runs the due schedules created, how many users they have, and the last delay in seconds."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        async with connect(subject.suite) as connection:
            (made,) = await connection.fetch(_MADE, _LABEL, due)
        if made["users"] >= _DUE or time.monotonic() > until:
            return made["runs"], made["users"], made["seconds"]
        await asyncio.sleep(0.2)


async def _rest(subject: Pawl) -> None:
    """Wait until no run is active, or until a time limit."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        if not await subject.ask("SELECT count(*) FROM job_store.runs WHERE state < 10") or time.monotonic() > until:
            return
        await asyncio.sleep(0.5)
