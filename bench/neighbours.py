"""P10: the effect on other stores of a store that offers 100 times its usual load.

Fifty stores together offer half of the peak load, each of them a fiftieth of that. Then one of them additionally offers
100 times as much, so that the total load is one and a half times Pawl's capacity.
"""

from __future__ import annotations

import asyncio
from typing import Final

from bench import load
from bench.figures import Figure, NotMeasured, at_most
from bench.load import Outcome, Owner
from bench.options import Options
from bench.overload import DEFAULT_LIMITS, PEAK_AT_ONCE, STORES, place
from bench.percentiles import percentile
from bench.subjects import Pawl
from bench.world import pawl

_BASE: Final = 0.5
_TIMES_SHARE: Final = 100.0
_TIMES_NORMAL_MAX: Final = 2.0
_NOISY: Final = place(0).store


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Measure the runs of the quiet stores with and without the noisy store."""
    seconds = options.seconds(40, 15)
    async with pawl(environment=DEFAULT_LIMITS, is_split=True) as (subject, _):
        await load.warm_up(subject.agents, place)
        peak = await load.peak(subject.agents, place, numbers=PEAK_AT_ONCE, seconds=options.seconds(10, 5))
        base = _BASE * peak
        before = await _quiet(subject, base, seconds)
        noise = asyncio.create_task(
            load.at_rate(base / STORES * _TIMES_SHARE, seconds, lambda number, due: _noisy(subject, number, due))
        )
        beside = await _quiet(subject, base, seconds)
        noisy = await noise
    if refused := load.refusals([*before, *beside]):
        return [NotMeasured(code="P10", why=f"runs of quiet stores did not complete: {refused}")]
    normal, disturbed = load.durations(before), load.durations(beside)
    return [
        at_most(
            _TIMES_NORMAL_MAX,
            code="P10",
            what=f"p99 of other stores beside one at {_TIMES_SHARE:g} times its share, relative to their normal p99",
            value=percentile(disturbed, 0.99) / percentile(normal, 0.99),
            unit="",
            detail={
                "normal p50, ms": percentile(normal, 0.5) * 1000,
                "normal p99, ms": percentile(normal, 0.99) * 1000,
                "disturbed p50, ms": percentile(disturbed, 0.5) * 1000,
                "disturbed p99, ms": percentile(disturbed, 0.99) * 1000,
                "samples of each": min(len(normal), len(disturbed)),
                "peak, /s": peak,
                "noise, /s": len(noisy) / seconds,
                "noise refused": sum(load.refusals(noisy).values()),
            },
        )
    ]


async def _quiet(subject: Pawl, rate: float, seconds: float) -> list[Outcome]:
    """Offer runs of all stores, and return the outcomes of the quiet stores."""
    found = await load.at_rate(rate, seconds, lambda number, due: load.play(subject.agents, place(number), due))
    return [outcome for outcome in found if outcome.place.store != _NOISY]


async def _noisy(subject: Pawl, number: int, due: float) -> Outcome:
    """Request a run of the noisy store without watching it."""
    return (await load.start(subject.agents, Owner(store=_NOISY, user=place(number * STORES).user), due))[0]
