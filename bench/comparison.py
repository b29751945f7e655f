"""P1 and P2: the same runs by Pawl and by common alternatives, side by side with the same model server.

There are three settings: one run at a time, many concurrent runs, and one run at a time on a slower disk. The last
setting is only for Pawl and the hand-written loop, which does not use the disk. The CPU time of Pawl's client is
included, because the others run their clients in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.database import slow_disk
from bench.environments import Unavailable
from bench.figures import Figure, NotMeasured, Point, at_least, at_most
from bench.options import Options
from bench.slices import CPU_AND_CLIENT, P50, RATE, Slice, Value, cpu_by_process, ratios, shown, take_turns
from bench.subjects import Pawl, Peer, Subject, start_request
from bench.world import model_server, scratch

BASE: Final = "handwritten"


def _peer(name: str, program: str, *, database: bool = False) -> Callable[[Path, str], Subject]:
    return lambda data, model_url: Peer(name, program, data, model_url, database=database)


def _with_effects(data: Path, model_url: str) -> Pawl:
    return Pawl(data, model_url, name="Pawl, a tool with effects", start=start_request("reserve"))


# In the order of their turns. Subjects that are compared with each other are neighbours.
SUBJECTS: Final[dict[str, Callable[[Path, str], Subject]]] = {
    "floor": _peer("raw floor", "handwritten/floor.py"),
    "pawl-effects": _with_effects,
    BASE: _peer("hand-written loop", "handwritten/run.py"),
    "pawl": Pawl,
    "restate": _peer("Restate", "restate/run.py"),
    "dbos-sqlite": _peer("DBOS, SQLite", "dbos/run.py"),
    "dbos-postgres": _peer("DBOS, PostgreSQL", "dbos/run.py", database=True),
    "agents-sdk": _peer("OpenAI Agents SDK, SQLite", "agents_sdk/run.py"),
    "langgraph-sqlite": _peer("LangGraph, SQLite", "langgraph/run.py"),
    "langgraph-postgres": _peer("LangGraph, PostgreSQL", "langgraph/run.py", database=True),
}
Slices = Mapping[str, Sequence[Slice]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A limit for a figure of Pawl, as a multiple of the figure of `beside` in the same turn."""

    code: str
    load: str
    what: str
    value: Value
    bound: float
    beside: str = BASE
    judge: Callable[..., Figure] = at_most


ALONE, CROWD, SLOW = "alone", "in a crowd", "alone, on a slow disk"
TARGETS: Final = (
    Target(code="P1", load=ALONE, what="p50", value=P50, bound=2.2),
    Target(code="P1", load=ALONE, what="p50", value=P50, bound=1.0, beside="restate"),
    Target(code="P1", load=ALONE, what="CPU a run", value=CPU_AND_CLIENT, bound=2.2),
    Target(code="P1", load=SLOW, what="p50", value=P50, bound=2.5),
    Target(code="P2", load=CROWD, what="CPU a run", value=CPU_AND_CLIENT, bound=0.9),
    Target(code="P2", load=CROWD, what="runs a second", value=RATE, bound=1.5, judge=at_least),
    Target(code="P2", load=CROWD, what="runs a second", value=RATE, bound=2.0, beside="restate", judge=at_least),
)
_COLUMNS: Final = (
    ("P1", ALONE, "p50", P50, "ms"),
    ("P1", ALONE, "CPU a run", CPU_AND_CLIENT, "ms"),
    ("P1", SLOW, "p50", P50, "ms"),
    ("P2", CROWD, "runs a second", RATE, "/s"),
    ("P2", CROWD, "CPU a run", CPU_AND_CLIENT, "ms"),
)


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Compare the chosen subjects.

    The figure of a target is reported as not measured unless both of its subjects were measured.
    """
    missing: list[NotMeasured] = []
    subjects: dict[str, Subject] = {}
    async with AsyncExitStack() as stack:
        data = await stack.enter_async_context(scratch())
        server = await stack.enter_async_context(model_server())
        for name in options.subjects:
            try:
                subjects[name] = await stack.enter_async_context(SUBJECTS[name](data / name, server.url))
            except Unavailable as error:
                missing.append(NotMeasured(code="P1", why=f"{name}: {error}"))
                continue
            await subjects[name].run(options.runs, options.at_once)
        seen: dict[str, Slices] = {
            ALONE: await take_turns(subjects, options.turns, runs=options.runs_alone, at_once=1),
            CROWD: await take_turns(subjects, options.turns, runs=options.runs, at_once=options.at_once),
        }
        without_disk = {name: subject for name, subject in subjects.items() if name == BASE}
        on_disk = {name: subject for name, subject in subjects.items() if isinstance(subject, Pawl)}
        for subject in on_disk.values():
            await slow_disk(subject.suite, options.sync_milliseconds)
        seen[SLOW] = await take_turns(without_disk | on_disk, options.turns, runs=options.runs_alone, at_once=1)
    names = {name: subject.name for name, subject in subjects.items()}
    return [*missing, *judged(names, seen), *points(names, seen)]


def judged(names: Mapping[str, str], seen: Mapping[str, Slices]) -> list[Figure | NotMeasured]:
    found: list[Figure | NotMeasured] = []
    for target in TARGETS:
        slices, pair = seen[target.load], ("pawl", target.beside)
        if not set(pair) <= set(slices):
            why = f"{target.what} {target.load}: not both of {' and '.join(pair)} were measured"
            found.append(NotMeasured(code=target.code, why=why))
            continue
        found.append(
            target.judge(
                target.bound,
                code=target.code,
                what=f"{target.what} {target.load}, as a multiple of {names[target.beside]}",
                unit="",
                detail={names[name]: shown(list(map(target.value, slices[name])))["value"] for name in pair},
                **shown(ratios(slices["pawl"], slices[target.beside], target.value)),
            )
        )
    return found


def points(names: Mapping[str, str], seen: Mapping[str, Slices]) -> list[Point]:
    """Return the figures of each subject, first as multiples of the hand-written loop and then as absolute values."""
    multiples, numbers = list[Point](), list[Point]()
    for code, load, what, value, unit in _COLUMNS:
        for name, slices in seen[load].items():
            title, series = f"{what} {load}", names[name]
            if base := seen[load].get(BASE):
                times = shown(ratios(slices, base, value))
                multiples.append(Point(code=code, what=title, series=series, unit="", **times))
            detail = cpu_by_process(slices) if value is CPU_AND_CLIENT else {}
            absolute = shown(list(map(value, slices)))
            numbers.append(Point(code=code, what=title, series=series, unit=unit, detail=detail, **absolute))
    return multiples + numbers
