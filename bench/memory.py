"""P9: the cost of an idle suite after a warm-up, and whether its memory grows under load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

from bench import load
from bench.figures import Figure, NotMeasured, at_most
from bench.load import Outcome, Owner
from bench.options import Options
from bench.processes import cpu_seconds, machine_cpu_seconds, proportional_mib, resident_mib, whole_mib
from bench.subjects import SYNCS, TRANSACTIONS, Pawl
from bench.world import model_server, pawl, scratch

_IDLE_MAX_MIB: Final = 120.0
_GROWTH_MAX_MIB_AN_HOUR: Final = 1.0
_RUNS_OF_A_SOAK: Final = 100_000
_AT_ONCE: Final = 16
_SETTLE_SECONDS: Final = 5.0
_REST_MAX_MIB: Final = 330.0
_REST_MAX_SYNCS: Final = 0.5
_REST_MAX_CPU_MS: Final = 25.0
_START_MAX_SECONDS: Final = 4.0
# After this time, the follow-up work of the warm-up is done.
_TAIL_SECONDS: Final = 20.0
# After this time, connections that the warm-up opened are closed.
_REST_SECONDS: Final = 60.0
# Autovacuum works on the warm-up's tables for minutes, and syncs more often than all other idle processes together.
_REST_SYNCS: Final = f"{SYNCS} AND backend_type <> 'autovacuum worker'"
_CPU: Final = ", CPU ms"
_SERVICES: Final = ("agent-loop", "tool-registry", "job-store", "notifier")


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Measure the startup time and the idle services, then put them under load and sample their memory every second."""
    start = await _start()
    async with pawl() as (subject, _):
        await subject.run(options.count(300, 100), _AT_ONCE)
        await asyncio.sleep(_SETTLE_SECONDS)
        whole, own = whole_mib(subject.processes()), resident_mib(subject.processes())
        rest = await _rest(subject)
        samples, runs = await _soak(subject, options.soak_seconds)
    detail = {f"{name} {kind}": sizes[name] for name in whole for kind, sizes in (("RSS", whole), ("USS", own))}
    worst = max(_SERVICES, key=lambda name: whole[name])
    idle = at_most(
        _IDLE_MAX_MIB,
        code="P9",
        what=f"resident memory of the largest service, idle ({worst})",
        value=whole[worst],
        unit="MiB",
        detail=detail,
    )
    return [start, idle, *rest, *_growth(samples, runs, options.soak_seconds)]


async def _start() -> Figure:
    """Return how long a suite takes to start. Its first start, which creates the database, does not count."""
    async with scratch() as data, model_server() as server:
        async with Pawl(data / "pawl", server.url):
            pass
        began, machine = time.monotonic(), machine_cpu_seconds()
        async with Pawl(data / "pawl", server.url) as subject:
            seconds, machine = time.monotonic() - began, machine_cpu_seconds() - machine
            cpu = cpu_seconds(subject.processes())
    return at_most(
        _START_MAX_SECONDS,
        code="P9",
        what="start of a suite with data until all services answer",
        value=seconds,
        unit="s",
        detail={"CPU of the machine, s": machine} | {f"{name}, CPU s": used for name, used in cpu.items()},
    )


async def _rest(subject: Pawl) -> list[Figure | NotMeasured]:
    """Return the disk syncs and the memory of the idle suite."""
    await asyncio.sleep(_TAIL_SECONDS)
    before = await _counts(subject)
    await asyncio.sleep(_REST_SECONDS)
    after = await _counts(subject)
    rates = {name: (after[name] - before[name]) / _REST_SECONDS for name in before}
    memory = proportional_mib(subject.processes())
    used = {name: rates.pop(name) for name in list(rates) if name.endswith(_CPU)}
    syncs = at_most(
        _REST_MAX_SYNCS,
        code="P9",
        what="log syncs of PostgreSQL in an idle suite, without autovacuum",
        value=rates.pop("syncs"),
        unit="a second",
        detail={f"{name} a second": rate for name, rate in rates.items()},
    )
    whole = at_most(
        _REST_MAX_MIB,
        code="P9",
        what="memory of an idle suite including NATS, without PostgreSQL, shared pages counted once",
        value=sum(mib for name, mib in memory.items() if name != "postgres"),
        unit="MiB",
        detail=memory,
    )
    cpu = at_most(
        _REST_MAX_CPU_MS,
        code="P9",
        what="idle: CPU of all processes",
        value=sum(used.values()),
        unit="ms/s",
        detail={name.removesuffix(_CPU): rate for name, rate in used.items()},
    )
    return [cpu, syncs, whole]


async def _counts(subject: Pawl) -> dict[str, float]:
    cpu = {f"{name}{_CPU}": seconds * 1000 for name, seconds in cpu_seconds(subject.processes()).items()}
    counts = {"syncs": float(await subject.ask(_REST_SYNCS)), "transactions": float(await subject.ask(TRANSACTIONS))}
    return counts | cpu


# Seconds since the start, completed runs, and MiB of each service.
Samples = list[tuple[float, int, Mapping[str, float]]]


async def _soak(subject: Pawl, seconds: float) -> tuple[Samples, int]:
    """Run some runs at all times. Return the samples and the number of runs that completed."""
    completed = 0
    services = {name: pid for name, pid in subject.processes().items() if name in _SERVICES}

    async def play(due: float) -> Outcome:
        nonlocal completed
        outcome = await load.play(subject.agents, Owner(), due)
        completed += outcome.ended is not None
        return outcome

    async def sample() -> None:
        began = time.monotonic()
        while True:
            samples.append((time.monotonic() - began, completed, await asyncio.to_thread(resident_mib, services)))
            await asyncio.sleep(1)

    samples: Samples = []
    sampler = asyncio.create_task(sample())
    try:
        outcomes = await load.at_once(_AT_ONCE, play, seconds=seconds)
    finally:
        sampler.cancel()
    if refused := load.refusals(outcomes):
        raise RuntimeError(f"runs did not complete: {refused}")
    return samples, completed


def _growth(samples: Samples, runs: int, seconds: float) -> list[Figure | NotMeasured]:
    """Compare the growth over the last two thirds of the time with its limit. After too few runs, only report it."""
    late = [sample for sample in samples if sample[0] > seconds / 3]
    an_hour = {name: slope([(at / 3600, mib[name]) for at, _, mib in late]) for name in _SERVICES}
    by_runs = {name: slope([(done / 1000, mib[name]) for _, done, mib in late]) for name in _SERVICES}
    worst = max(_SERVICES, key=lambda name: an_hour[name])
    detail = {"runs": float(runs)}
    detail |= {f"{name}, MiB an hour": value for name, value in an_hour.items()}
    detail |= {f"{name}, MiB a 1,000 runs": value for name, value in by_runs.items()}
    what = f"largest growth of a service, last two thirds of {seconds:g} s ({worst})"
    if runs < _RUNS_OF_A_SOAK:
        why = f"the test was too short: {runs:,} of {_RUNS_OF_A_SOAK:,} runs; use a longer --soak-seconds"
        growth = Figure(code="P9", what=what, value=an_hour[worst], unit="MiB/h", detail=detail)
        return [growth, NotMeasured(code="P9", why=why)]
    bound = _GROWTH_MAX_MIB_AN_HOUR
    return [at_most(bound, code="P9", what=what, value=an_hour[worst], unit="MiB/h", detail=detail)]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope of (x, y), or 0 if x does not change."""
    if not points:
        return 0.0
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    width = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / width if width else 0.0
