"""P11: two agent-loops and two registries beside one of each, on a model with 20 ms between the chunks."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import Final

import psutil

from bench import load
from bench.figures import Figure, NotMeasured, Point
from bench.load import Place
from bench.options import Options
from bench.processes import cpu_seconds
from bench.subjects import Pawl
from bench.world import pawl

_CHUNK_MS: Final = 20.0
_FULL: Final = 0.92
_OTHERS_MAX: Final = 0.1
_RAMP_SECONDS_MAX: Final = 10.0
_GROWTH_MIN: Final = 1.05
# A replica takes all that come: what is measured is not a limit of its settings.
_LIMITS: Final = {
    "PAWL_RUNS_MAX": "2000",
    "PAWL_ACTIVE_RUNS_PER_STORE": "2000",
    "PAWL_ACTIVE_RUNS_PER_USER": "2000",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """What so many runs at once showed.

    `cores_busy` is the part of the machine's time that anybody used, and `others_busy` that of processes which this
    benchmark did not start.
    """

    at_once: int
    runs_per_second: float
    cores_busy: float
    others_busy: float
    agent_loops_cores: float


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Measure runs a second at rising numbers at once, with one and with two replicas."""
    levels = (16, 64) if options.quick else (8, 24, 64, 128, 256)
    curves = {count: await _curve(count, levels, options.seconds(10, 6)) for count in (1, 2)}
    points: list[Figure | NotMeasured] = [
        _point(f"{count} of each", what, level.at_once, value, unit)
        for count, curve in curves.items()
        for level in curve
        for what, value, unit in (
            ("runs a second by runs at once", level.runs_per_second, "/s"),
            ("cores in use", level.cores_busy * (psutil.cpu_count() or 1), ""),
        )
    ]
    return [_judged(curves[1], curves[2]), *points]


async def _curve(replicas: int, levels: tuple[int, ...], seconds: float) -> list[_Level]:
    counts = {"agent-loop": replicas, "tool-registry": replicas}
    async with pawl(replicas=counts, environment=_LIMITS, chunk_milliseconds=_CHUNK_MS) as (subject, _):
        await subject.run(32, 16)
        return [await _level(subject, number, seconds) for number in levels]


async def _level(subject: Pawl, number: int, seconds: float) -> _Level:
    """Keep `number` runs going, and count what completes once as many have ended."""
    completed = 0
    steady = asyncio.Event()

    async def play(due: float) -> None:
        nonlocal completed
        outcome = await load.play(subject.agents, Place(), due)
        if outcome.ended is None:
            raise RuntimeError(f"a run did not complete: {outcome.refusal}")
        completed += 1
        if completed == number:
            steady.set()

    loop = asyncio.get_running_loop()
    running = asyncio.create_task(load.at_once(number, play))
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(steady.wait(), _RAMP_SECONDS_MAX)
        before, agents, began, ours = completed, _agent_loops(subject), loop.time(), _ours()
        psutil.cpu_percent()
        await asyncio.wait({running}, timeout=seconds)
        if running.done():
            await running
        elapsed = loop.time() - began
        busy = psutil.cpu_percent() / 100
        return _Level(
            at_once=number,
            runs_per_second=(completed - before) / elapsed,
            cores_busy=busy,
            others_busy=max(0.0, busy - (_ours() - ours) / elapsed / (psutil.cpu_count() or 1)),
            agent_loops_cores=(_agent_loops(subject) - agents) / elapsed,
        )
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _ours() -> float:
    """Return the CPU time of this process and all that it started: Pawl, the model server, the clients."""
    return cpu_seconds({"all": os.getpid()})["all"]


def _agent_loops(subject: Pawl) -> float:
    return sum(used for name, used in cpu_seconds(subject.processes()).items() if name.startswith("agent-loop"))


def _judged(one: list[_Level], two: list[_Level]) -> Figure:
    """Compare the best of both. Nothing is judged where one of each filled the cores, or others used them."""
    best_one = max(one, key=lambda level: level.runs_per_second)
    best_two = max(two, key=lambda level: level.runs_per_second)
    others = max(best_one.others_busy, best_two.others_busy)
    growth = best_two.runs_per_second / best_one.runs_per_second
    full = best_one.cores_busy >= _FULL
    first_full = {
        count: next((level.at_once for level in curve if level.cores_busy >= _FULL), 0)
        for count, curve in ((1, one), (2, two))
    }
    return Figure(
        code="P11",
        what="most runs a second with two of each, of that with one of each"
        + (": one of each fills the cores already" if full else ""),
        value=growth,
        unit="",
        target=f"over {_GROWTH_MIN:g} until the cores are full",
        met=None if others > _OTHERS_MAX or (full and growth < _GROWTH_MIN) else growth >= _GROWTH_MIN,
        bound=_GROWTH_MIN,
        detail={
            "one of each, /s": best_one.runs_per_second,
            "two of each, /s": best_two.runs_per_second,
            "one agent-loop, cores": best_one.agent_loops_cores,
            "two agent-loops, cores": best_two.agent_loops_cores,
            "part of the cores that other programs used": others,
            "cores full with one of each from, at once": first_full[1],
            "cores full with two of each from, at once": first_full[2],
        },
    )


def _point(series: str, what: str, at: float, value: float, unit: str) -> Point:
    return Point(code="P11", what=what, series=series, at=at, value=value, unit=unit)
