"""P6: the time until StartRun is acknowledged in a burst, while 200 runs are active.

Clients and runs have separate processes (PAWL_ROLE) or, for comparison, share one. A store may have 200 active runs.
Another 200 are queued before the burst starts, so that the runs of the burst queue behind them. Each burst uses a new
Pawl without a backlog.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench import load
from bench.figures import Figure, Measured, NotMeasured, at_least, at_most
from bench.load import Outcome, Owner
from bench.options import Options
from bench.percentiles import percentile
from bench.world import pawl
from pawl.event.v1 import run_pb2

_RATE: Final = 500.0
_P99_MAX_MS: Final = 100.0
_AT_ONCE: Final = (64, 128)
_AT_WORK: Final = 200
_LIMITS: Final = {"PAWL_ACTIVE_RUNS_PER_STORE": str(_AT_WORK), "PAWL_ACTIVE_RUNS_PER_USER": str(_AT_WORK)}
_COUNT: Final = "SELECT count(*) FROM job_store.runs WHERE state = $1"


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Send bursts at 500 requests/s regardless of the responses, and bursts with a fixed number of open requests."""
    count, seconds = options.count(2000, 1000), options.seconds(20, 10)
    found: list[Figure | NotMeasured] = []
    rates = []
    for number, is_split in ((None, False), *((number, True) for number in (None, *_AT_ONCE))):
        outcomes, completed, at_work = await _burst(count, number, seconds, is_split=is_split)
        how = f"{_RATE:g} a second" if number is None else f"{number} concurrent"
        rate = _rate(outcomes)
        milliseconds = [outcome.acknowledged_seconds * 1000 for outcome in outcomes]
        measured = Measured(
            code="P6",
            what=f"StartRun acknowledged, {how}, p99",
            value=percentile(milliseconds, 0.99),
            unit="ms",
            detail={
                "sent": len(outcomes),
                "p50, ms": percentile(milliseconds, 0.5),
                "acknowledged, /s": rate,
                "runs completed meanwhile": completed,
                "active runs before and after, the smaller number": at_work,
                "refused": float(sum(load.refusals(outcomes).values())),
            },
        )
        if is_split:
            rates.append(rate)
            found.append(at_most(_P99_MAX_MS, **measured))
        else:
            measured["what"] += ", by a process that drives the runs too"
            found.append(Figure(**measured))
    highest = at_least(_RATE, code="P6", what="StartRun acknowledged, highest rate", value=max(rates), unit="/s")
    return [*found, highest]


async def _burst(
    count: int, number: int | None, seconds: float, *, is_split: bool
) -> tuple[list[Outcome], float, float]:
    """Send `count` requests. Return their outcomes, the number of completed runs, and the number of active runs.

    If `number` is None, requests are sent at the target rate. Otherwise `number` requests stay open, for at most
    `seconds`.
    """
    place = Owner()
    async with pawl(environment=_LIMITS, is_split=is_split) as (subject, _):
        await subject.run(64, 32)

        async def start(due: float) -> Outcome:
            return (await load.start(subject.agents, place, due))[0]

        await load.at_once(32, start, count=2 * _AT_WORK)
        before = await subject.ask(_COUNT, run_pb2.RUN_STATE_COMPLETED)
        at_work = await subject.ask(_COUNT, run_pb2.RUN_STATE_RUNNING)
        if number is None:
            outcomes = await load.at_rate(_RATE, count / _RATE, lambda _, due: start(due))
        else:
            outcomes = await load.at_once(number, start, count=count, seconds=seconds)
        at_work = min(at_work, await subject.ask(_COUNT, run_pb2.RUN_STATE_RUNNING))
        return outcomes, float(await subject.ask(_COUNT, run_pb2.RUN_STATE_COMPLETED) - before), float(at_work)


def _rate(outcomes: Sequence[Outcome]) -> float:
    """Return acknowledgements per second, from the first request to the last acknowledgement."""
    taken = [outcome for outcome in outcomes if not outcome.refusal]
    if not taken:
        return 0.0
    return len(taken) / (max(outcome.answered for outcome in taken) - min(outcome.began for outcome in outcomes))
