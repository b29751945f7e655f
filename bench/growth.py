"""P20: the latency that Pawl adds to each model call, and the memory of the services after many runs."""

from __future__ import annotations

import asyncio
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench import load
from bench.figures import Figure, NotMeasured, at_least, at_most
from bench.load import Outcome, Owner
from bench.options import Options
from bench.processes import proportional_mib
from bench.subjects import Pawl
from bench.world import pawl

_GROWTH_MAX_MIB: Final = 10.0
_AT_ONCE: Final = 4
# After this time, the follow-up work of the runs is done.
_SETTLE_SECONDS: Final = 20.0
_SERVICES: Final = ("agent-loop", "tool-registry", "job-store", "notifier", "gateway")
_ADDED: Final = "pawl_agent_loop_model_added_latency_seconds"
# The percentage of model calls that Pawl delays by at most this many milliseconds: p50 under 2 ms, p99 under 10 ms.
_WITHIN: Final = {2: 50.0, 10: 99.0}


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Do 10,000 and then 100,000 runs in total, a few at a time. In the short form, 100 times fewer."""
    early, late = options.count(10_000, 100), options.count(100_000, 1000)
    async with pawl() as (subject, _):

        async def play(due: float) -> Outcome:
            return await load.play(subject.agents, Owner(), due)

        await load.at_once(_AT_ONCE, play, count=early)
        before = await _memory(subject)
        await load.at_once(_AT_ONCE, play, count=late - early)
        after = await _memory(subject)
        added = await _added(subject)
    grown = {name: after[name] - before[name] for name in after}
    worst = max(grown, key=lambda name: grown[name])
    growth = at_most(
        _GROWTH_MAX_MIB,
        code="P20",
        what=f"memory of a service after {late:,} runs, more than after {early:,} ({worst})",
        value=grown[worst],
        unit="MiB",
        detail=grown | {f"{name} after": mib for name, mib in after.items()},
    )
    return [*added, growth]


async def _memory(subject: Pawl) -> dict[str, float]:
    await asyncio.sleep(_SETTLE_SECONDS)
    services = {name: pid for name, pid in subject.processes().items() if name in _SERVICES}
    return proportional_mib(services)


async def _added(subject: Pawl) -> list[Figure]:
    url = f"http://{subject.suite.endpoints.services['agent-loop'][0].metrics}/metrics"
    async with httpx.AsyncClient() as client:
        text = (await client.get(url)).text
    buckets = {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"{_ADDED}_bucket"
    }
    calls = buckets[float("inf")]
    return [
        at_least(
            target,
            code="P20",
            what=f"model calls to which Pawl adds at most {milliseconds} ms, with {_AT_ONCE} runs at a time",
            value=100 * buckets[milliseconds / 1000] / calls,
            unit="%",
            detail={"calls": calls},
        )
        for milliseconds, target in _WITHIN.items()
    ]
