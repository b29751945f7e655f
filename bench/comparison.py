"""P1 and P2: the same runs by Pawl and by what people use instead, in turn, against the same model server."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.environments import Unavailable
from bench.figures import Figure, NotMeasured, Point, at_least, at_most
from bench.options import Options
from bench.processes import cpu_seconds
from bench.subjects import Pawl, Peer, Subject
from bench.world import model_server, scratch

SUBJECTS: Final[dict[str, Callable[[Path, str], Subject]]] = {
    "pawl": Pawl,
    "handwritten": lambda data, model: Peer("hand-written loop", "handwritten", data, model),
    "langgraph-postgres": lambda data, model: Peer("LangGraph, PostgreSQL", "langgraph", data, model, database=True),
    "langgraph-sqlite": lambda data, model: Peer("LangGraph, SQLite", "langgraph", data, model),
    "agents-sdk": lambda data, model: Peer("OpenAI Agents SDK, SQLite", "agents_sdk", data, model),
    "dbos": lambda data, model: Peer("DBOS, PostgreSQL", "dbos", data, model, database=True),
    "restate": lambda data, model: Peer("Restate", "restate", data, model),
}
# Those that go on with a run after a crash.
DURABLE_PEERS: Final = frozenset({"langgraph-postgres", "langgraph-sqlite", "dbos", "restate"})
CPU: Final = "CPU a run"
RATE: Final = "runs a second"
ALONE: Final = "one run alone"
_CPU_OF_HANDWRITTEN_MAX: Final = 1.0
_RUNS_A_SECOND_MIN: Final = 110.0
_TIMES_BEST_PEER_MIN: Final = 2.0


@dataclass(slots=True)
class Measured:
    """What one subject showed, a number per repetition; `cpu` by process, in milliseconds a run."""

    name: str
    cpu: list[dict[str, float]] = field(default_factory=list)
    runs_per_second: list[float] = field(default_factory=list)
    alone_milliseconds: list[float] = field(default_factory=list)

    @property
    def cpu_milliseconds(self) -> list[float]:
        """CPU of all processes, a run."""
        return [sum(cpu.values()) for cpu in self.cpu]


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Compare the chosen subjects; with Pawl and the hand-written loop among them the targets are judged."""
    measured, missing = await _compare(options)
    return [*missing, *figures(measured, at_once=options.at_once)]


async def _compare(options: Options) -> tuple[dict[str, Measured], list[NotMeasured]]:
    """Let all chosen subjects do the same in turn, several times."""
    subjects: dict[str, tuple[Subject, Measured]] = {}
    missing: list[NotMeasured] = []
    async with AsyncExitStack() as stack:
        data = await stack.enter_async_context(scratch())
        server = await stack.enter_async_context(model_server())
        for name in options.subjects:
            try:
                subject = await stack.enter_async_context(SUBJECTS[name](data / name, server.url))
            except Unavailable as error:
                missing.append(NotMeasured(code="P1", why=f"{name}: {error}"))
                continue
            await subject.run(options.at_once * 2, options.at_once)
            subjects[name] = (subject, Measured(subject.name))
        for _ in range(options.repetitions):
            for subject, measured in subjects.values():
                await _measure_once(subject, measured, runs=options.runs, at_once=options.at_once)
    return {name: measured for name, (_, measured) in subjects.items()}, missing


async def _measure_once(subject: Subject, measured: Measured, *, runs: int, at_once: int) -> None:
    """Do `runs` runs, `at_once` at a time, and a few alone; add what they cost."""
    alone = await subject.run(max(5, runs // 20), 1)
    measured.alone_milliseconds.append(statistics.median(alone) * 1000)
    before = cpu_seconds(subject.processes())
    loop = asyncio.get_running_loop()
    began = loop.time()
    await subject.run(runs, at_once)
    measured.runs_per_second.append(runs / (loop.time() - began))
    after = cpu_seconds(subject.processes())
    measured.cpu.append({name: (after[name] - before[name]) / runs * 1000 for name in after})


def figures(measured: dict[str, Measured], *, at_once: int) -> list[Figure | NotMeasured]:
    """Return Pawl beside the others, and every subject's own figures."""
    found: list[Figure | NotMeasured] = []
    pawl, base = measured.get("pawl"), measured.get("handwritten")
    if pawl is not None:
        found += _judged_cpu(pawl, base)
        found += _judged_rate(pawl, {name: measured[name] for name in DURABLE_PEERS & set(measured)}, at_once)
    for subject in measured.values():
        parts = {name: statistics.median(cpu[name] for cpu in subject.cpu) for name in subject.cpu[0]}
        found += [
            _point(subject, "P1", CPU, "ms", subject.cpu_milliseconds, detail=parts),
            _point(subject, "P2", RATE, "/s", subject.runs_per_second),
            _point(subject, "P2", ALONE, "ms", subject.alone_milliseconds),
        ]
    return found


def _judged_cpu(pawl: Measured, base: Measured | None) -> list[Figure | NotMeasured]:
    if base is None:
        return [NotMeasured(code="P1", why="the hand-written loop was not among the subjects")]
    # Repetition by repetition: what slows the machine for a while slows both.
    ratios = [ours / theirs for ours, theirs in zip(pawl.cpu_milliseconds, base.cpu_milliseconds, strict=True)]
    ours, theirs = statistics.median(pawl.cpu_milliseconds), statistics.median(base.cpu_milliseconds)
    return [
        at_most(
            _CPU_OF_HANDWRITTEN_MAX,
            code="P1",
            what="CPU a run, as a multiple of the hand-written loop's",
            value=statistics.median(ratios),
            unit="",
            spread=(min(ratios), max(ratios)),
            detail={"Pawl, ms": ours, "hand-written, ms": theirs},
        )
    ]


def _judged_rate(pawl: Measured, peers: dict[str, Measured], at_once: int) -> list[Figure | NotMeasured]:
    rates = pawl.runs_per_second
    rate = at_least(
        _RUNS_A_SECOND_MIN,
        code="P2",
        what=f"runs a second, {at_once} at once",
        value=statistics.median(rates),
        unit="/s",
        spread=(min(rates), max(rates)),
    )
    if not peers:
        return [rate, NotMeasured(code="P2", why="no durable peer was among the subjects")]
    best = max(peers.values(), key=lambda peer: statistics.median(peer.runs_per_second))
    ratios = [ours / theirs for ours, theirs in zip(rates, best.runs_per_second, strict=True)]
    beside = at_least(
        _TIMES_BEST_PEER_MIN,
        code="P2",
        what=f"runs a second, as a multiple of the best durable peer's ({best.name})",
        value=statistics.median(ratios),
        unit="",
        spread=(min(ratios), max(ratios)),
        detail={f"{peer.name}, /s": statistics.median(peer.runs_per_second) for peer in peers.values()},
    )
    return [rate, beside]


def _point(
    subject: Measured,
    code: str,
    what: str,
    unit: str,
    values: Sequence[float],
    *,
    detail: dict[str, float] | None = None,
) -> Point:
    return Point(
        code=code,
        what=what,
        series=subject.name,
        value=statistics.median(values),
        unit=unit,
        spread=(min(values), max(values)),
        detail=detail or {},
    )
