"""P10: an overload from many stores with three times as many runs as Pawl can do.

Measured are refusals and recovery time. The limits on active runs are the defaults. Each store can queue the runs of
ten seconds at its part of the peak rate, as an operator would configure it, because longer waits do not help users.
Clients and runs have separate processes (PAWL_ROLE).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from bench import load
from bench.figures import Figure, NotMeasured, at_least, at_most
from bench.load import Outcome, Owner
from bench.options import Options
from bench.percentiles import percentile
from bench.subjects import Pawl
from bench.world import pawl
from pawl.event.v1 import run_pb2
from tests.service import stages

STORES: Final = 50
DEFAULT_LIMITS: Final[Mapping[str, str]] = {"PAWL_ACTIVE_RUNS_PER_STORE": "20", "PAWL_ACTIVE_RUNS_PER_USER": "5"}
PEAK_AT_ONCE: Final = (32, 96)
_USERS: Final = 4
_TIMES_PEAK: Final = 3.0
_QUEUE_SECONDS: Final = 10.0
_GOODPUT_MIN: Final = 0.8
_REFUSED_MAX_MS: Final = 250.0
_RECOVERY_MAX_SECONDS: Final = 30.0
_RECOVERY_PATIENCE_SECONDS: Final = 120.0
_NORMAL_TIMES_ALONE: Final = 2.0
_PROBES: Final = Owner(store="probe")
_TERMINAL_FROM: Final = 10  # States of runs; see the ledger's tables.
_COMPLETED: Final = """
    SELECT count(*) FROM job_store.runs WHERE state = $1 AND store_id <> 'probe' AND end_time >= $2 AND end_time < $3
"""
_OPEN: Final = "SELECT count(*) FROM job_store.runs WHERE state < $1 AND store_id <> 'probe'"


def place(number: int) -> Owner:
    """Return the owner of run `number`. Stores and their users take turns."""
    return Owner(store=f"store-{number % STORES}", user=f"user-{number // STORES % _USERS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """The result of an overload. `recovered_seconds` is None if Pawl did not recover within the time limit."""

    outcomes: Sequence[Outcome]
    completed_per_second: float
    alone_seconds: float
    drained_seconds: float | None
    recovered_seconds: float | None


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Find the peak rate, offer three times this rate for a while, and wait for the recovery."""
    async with pawl(environment=DEFAULT_LIMITS, is_split=True) as (subject, _):
        await load.warm_up(subject.agents, place)
        peak = await load.peak(subject.agents, place, numbers=PEAK_AT_ONCE, seconds=options.seconds(15, 8))
    seconds = options.seconds(60, 20)
    queue = max(1, math.ceil(_QUEUE_SECONDS * peak / STORES))
    short = stages(job_store={"queued_runs_per_store": queue})
    async with pawl(environment=DEFAULT_LIMITS, is_split=True, stages=short) as (subject, _):
        await load.warm_up(subject.agents, place)
        seen = await _overload(subject, _TIMES_PEAK * peak, seconds)
    return [_goodput(seen, peak, seconds, queue), *_refusals(seen.outcomes), _recovery(seen)]


async def _overload(subject: Pawl, rate: float, seconds: float) -> _Seen:
    """Offer `rate` runs per second, then do single runs until one takes its normal time."""
    probes = await load.at_once(1, lambda due: load.play(subject.agents, _PROBES, due), count=20)
    alone = percentile(load.durations(probes), 0.5)
    began: datetime = await subject.ask("SELECT clock_timestamp()")
    offering = asyncio.create_task(
        load.at_rate(rate, seconds, lambda number, due: load.play(subject.agents, place(number), due))
    )
    await asyncio.sleep(seconds)
    ended: datetime = await subject.ask("SELECT clock_timestamp()")
    drained, recovered = await _recover(subject, alone)
    completed: Any = await subject.ask(_COMPLETED, run_pb2.RUN_STATE_COMPLETED, began, ended)
    return _Seen(
        outcomes=await offering,
        completed_per_second=completed / (ended - began).total_seconds(),
        alone_seconds=alone,
        drained_seconds=drained,
        recovered_seconds=recovered,
    )


async def _recover(subject: Pawl, alone_seconds: float) -> tuple[float | None, float | None]:
    """Return the seconds until the backlog was empty, and until a single run took its normal time."""
    began = time.monotonic()
    drained: float | None = None
    while (now := time.monotonic()) < began + _RECOVERY_PATIENCE_SECONDS:
        probe = await load.play(subject.agents, _PROBES, now)
        if drained is None and not await subject.ask(_OPEN, _TERMINAL_FROM):
            drained = time.monotonic() - began
        is_normal = probe.ended is not None and probe.ended - now <= _NORMAL_TIMES_ALONE * alone_seconds
        if is_normal and drained is not None:
            return drained, time.monotonic() - began
        await asyncio.sleep(0.1)
    return drained, None


def _goodput(seen: _Seen, peak: float, seconds: float, queue: int) -> Figure:
    latencies = load.durations(seen.outcomes)
    return at_least(
        _GOODPUT_MIN,
        code="P10",
        what=f"goodput at {_TIMES_PEAK:g} times the peak for {seconds:g} s, relative to the peak",
        value=seen.completed_per_second / peak,
        unit="",
        detail={
            "peak, /s": peak,
            "offered, /s": len(seen.outcomes) / seconds,
            "completed, /s": seen.completed_per_second,
            "queue of a store, runs": queue,
            "accepted runs, p50 s": percentile(latencies, 0.5),
            "accepted runs, p99 s": percentile(latencies, 0.99),
        },
    )


def _refusals(outcomes: Sequence[Outcome]) -> list[Figure | NotMeasured]:
    """Return the number of refusals without a reason for programs to act on, and the time of refusals."""
    refused = [outcome for outcome in outcomes if outcome.refusal]
    if not refused:
        return [NotMeasured(code="P10", why="nothing was refused")]
    untyped = sum(not outcome.is_typed for outcome in refused)
    at_start = [outcome.acknowledged_seconds * 1000 for outcome in outcomes if not outcome.accepted]
    accepted = [outcome.acknowledged_seconds * 1000 for outcome in outcomes if outcome.accepted]
    found: list[Figure | NotMeasured] = [
        at_most(
            0,
            code="P10",
            what="refusals in the overload without a reason, and accepted runs that failed",
            value=untyped,
            unit="",
            detail={name: float(count) for name, count in load.refusals(outcomes).items()},
        )
    ]
    if at_start:
        detail = {"p50, ms": percentile(at_start, 0.5)}
        detail |= {"accepted, p99 ms": percentile(accepted, 0.99)} if accepted else {}
        high = percentile(at_start, 0.99)
        what = "refusal of StartRun in the overload, p99"
        found.append(at_most(_REFUSED_MAX_MS, code="P10", what=what, value=high, unit="ms", detail=detail))
    return found


def _recovery(seen: _Seen) -> Figure | NotMeasured:
    if seen.recovered_seconds is None or seen.drained_seconds is None:
        what = "the backlog was not gone" if seen.drained_seconds is None else "single runs were not back to normal"
        return Figure(
            code="P10",
            what=f"recovery: {what} after",
            value=_RECOVERY_PATIENCE_SECONDS,
            unit="s",
            target=f"at most {_RECOVERY_MAX_SECONDS:g} s",
            met=False,
        )
    return at_most(
        _RECOVERY_MAX_SECONDS,
        code="P10",
        what=f"recovery: no backlog, and a single run takes at most {_NORMAL_TIMES_ALONE:g} times its normal time",
        value=seen.recovered_seconds,
        unit="s",
        detail={"backlog gone, s": seen.drained_seconds, "run alone before, ms": seen.alone_seconds * 1000},
    )
