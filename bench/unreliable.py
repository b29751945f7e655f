"""P19: the success rate of runs with a faulty model server: failing calls, and outages of 20 seconds."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Final

from bench import load
from bench.figures import Figure, NotMeasured, at_least
from bench.load import Outcome, Owner
from bench.options import Options
from bench.percentiles import percentile
from bench.subjects import Pawl
from bench.world import model_server, scratch
from pawl.event.v1 import run_pb2

_SUCCESS_MIN_PERCENT: Final = 99.9
_FAULT_PERCENT: Final = 10
_OUTAGE_EVERY_SECONDS: Final = 60
_OUTAGE_SECONDS: Final = 20
_RUNS_PER_SECOND: Final = 2.0
_USERS: Final = 20
_DRAIN_SECONDS: Final = 300.0
_COMPLETED: Final = "SELECT count(*) FROM job_store.runs WHERE state = $1"


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Start runs at a fixed rate and wait for their end. A run counts even if its client's stream broke."""
    faults = {"fault_percent": _FAULT_PERCENT, "outage_every": _OUTAGE_EVERY_SECONDS, "outage_seconds": _OUTAGE_SECONDS}
    async with AsyncExitStack() as stack:
        data = await stack.enter_async_context(scratch())
        server = await stack.enter_async_context(model_server(**faults))
        subject = await stack.enter_async_context(Pawl(data / "pawl", server.url))

        async def play(number: int, due: float) -> Outcome:
            return await load.play(subject.agents, Owner(user=f"user-{number % _USERS}"), due)

        outcomes = await load.at_rate(_RUNS_PER_SECOND, options.seconds(900, 120), play)
        async with asyncio.timeout(_DRAIN_SECONDS):
            while await subject.ask("SELECT count(*) FROM job_store.runs WHERE state < 10"):  # noqa: ASYNC110
                await asyncio.sleep(1)
        completed = await subject.ask(_COMPLETED, run_pb2.RUN_STATE_COMPLETED)
    seconds = [each.ended - each.began for each in outcomes if each.ended is not None]
    refusals = Counter(each.refusal for each in outcomes if each.ended is None)
    detail = {"runs": float(len(outcomes)), "p50, s": percentile(seconds, 0.5), "p99, s": percentile(seconds, 0.99)}
    return [
        at_least(
            _SUCCESS_MIN_PERCENT,
            code="P19",
            what=f"runs that complete while {_FAULT_PERCENT} % of calls fail, with outages of {_OUTAGE_SECONDS} s",
            value=100 * int(completed) / len(outcomes),
            unit="%",
            detail=detail | {reason: float(count) for reason, count in refusals.items()},
        )
    ]
