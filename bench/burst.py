"""P6: how soon StartRun is acknowledged when many come together. The runs start meanwhile, and are load themselves.

Each burst has a fresh Pawl, so that none begins on the backlog of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench import load
from bench.figures import Figure, NotMeasured, at_least, at_most
from bench.load import Outcome, Place
from bench.options import Options
from bench.percentiles import percentile
from bench.world import pawl
from pawl.event.v1 import run_pb2

_RATE: Final = 500.0
_P99_MAX_MS: Final = 100.0
_AT_ONCE: Final = (64, 128)
_COMPLETED: Final = "SELECT count(*) FROM job_store.runs WHERE state = $1"


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Send a burst at 500 a second, whatever is answered, and some with so many requests open at once."""
    count, seconds = options.count(2000, 1000), options.seconds(20, 10)
    found: list[Figure | NotMeasured] = []
    rates = []
    for number in (None, *_AT_ONCE):
        outcomes, completed = await _burst(count, number, seconds)
        rates.append(_rate(outcomes))
        how = f"{_RATE:g} a second" if number is None else f"{number} at once"
        milliseconds = [outcome.acknowledged_seconds * 1000 for outcome in outcomes]
        found.append(
            at_most(
                _P99_MAX_MS,
                code="P6",
                what=f"StartRun acknowledged, {how}, p99",
                value=percentile(milliseconds, 0.99),
                unit="ms",
                detail={
                    "sent": len(outcomes),
                    "p50, ms": percentile(milliseconds, 0.5),
                    "acknowledged, /s": rates[-1],
                    "runs completed meanwhile": completed,
                    "refused": float(sum(load.refusals(outcomes).values())),
                },
            )
        )
    highest = at_least(_RATE, code="P6", what="StartRun acknowledged, highest rate", value=max(rates), unit="/s")
    return [*found, highest]


async def _burst(count: int, number: int | None, seconds: float) -> tuple[list[Outcome], float]:
    """Send `count` requests, and return what became of them and how many runs completed.

    They go `number` at once, for at most so many seconds, or all at the rate of the target.
    """
    place = Place()
    async with pawl() as (subject, _):
        await subject.run(64, 32)
        before = await subject.ask(_COMPLETED, run_pb2.RUN_STATE_COMPLETED)

        async def start(due: float) -> Outcome:
            return (await load.start(subject.agents, place, due))[0]

        if number is None:
            outcomes = await load.at_rate(_RATE, count / _RATE, lambda _, due: start(due))
        else:
            outcomes = await load.at_once(number, start, count=count, seconds=seconds)
        return outcomes, float(await subject.ask(_COMPLETED, run_pb2.RUN_STATE_COMPLETED) - before)


def _rate(outcomes: Sequence[Outcome]) -> float:
    """Return the acknowledgements a second, from the first request to the last acknowledgement."""
    taken = [outcome for outcome in outcomes if not outcome.refusal]
    if not taken:
        return 0.0
    return len(taken) / (max(outcome.answered for outcome in taken) - min(outcome.began for outcome in outcomes))
