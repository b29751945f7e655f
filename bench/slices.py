"""Measures subjects side by side: all stay up and take turns in short slices, so that other load affects all of them.

A single slice means little. The ratio between two slices of the same turn means more, and its median over all turns is
the figure. The quartiles of the ratios show the spread.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from bench.percentiles import percentile
from bench.processes import cpu_seconds
from bench.subjects import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The result of one slice. `cpu` is the CPU time of each process and `client` that of this process, in ms per run.

    If a subject has a driver program, that program includes the client, so `client` is almost 0.
    """

    cpu: Mapping[str, float]
    client: float
    runs_per_second: float
    p50_milliseconds: float

    @property
    def cpu_milliseconds(self) -> float:
        """The CPU time of all processes, in milliseconds per run."""
        return sum(self.cpu.values())


Value = Callable[[Slice], float]
CPU: Final[Value] = lambda one: one.cpu_milliseconds  # noqa: E731  # consistent with the next line
CPU_AND_CLIENT: Final[Value] = lambda one: one.cpu_milliseconds + one.client  # noqa: E731
P50: Final[Value] = lambda one: one.p50_milliseconds  # noqa: E731
RATE: Final[Value] = lambda one: one.runs_per_second  # noqa: E731


class Shown(TypedDict):
    value: float
    spread: tuple[float, float]


async def take_turns(subjects: Mapping[str, Subject], turns: int, *, runs: int, at_once: int) -> dict[str, list[Slice]]:
    """Let each subject do `runs` runs per turn, `at_once` concurrently. Every other turn is in reverse order."""
    found: dict[str, list[Slice]] = {name: [] for name in subjects}
    order = list(subjects)
    for _ in range(turns):
        for name in order:
            found[name].append(await _slice(subjects[name], runs, at_once))
        order.reverse()
    return found


async def _slice(subject: Subject, runs: int, at_once: int) -> Slice:
    loop = asyncio.get_running_loop()
    before, client, began = cpu_seconds(subject.processes()), time.process_time(), loop.time()
    seconds = await subject.run(runs, at_once)
    took, client, after = loop.time() - began, time.process_time() - client, cpu_seconds(subject.processes())
    return Slice(
        cpu={name: (after[name] - before[name]) / runs * 1000 for name in after},
        client=client / runs * 1000,
        runs_per_second=runs / took,
        p50_milliseconds=percentile(seconds, 0.5) * 1000,
    )


def shown(values: Sequence[float]) -> Shown:
    """Return the median and the quartiles of the values."""
    return Shown(value=statistics.median(values), spread=(percentile(values, 0.25), percentile(values, 0.75)))


def ratios(ours: Sequence[Slice], theirs: Sequence[Slice], value: Value) -> list[float]:
    """Return the ratios of the values, slice by slice."""
    return [value(our) / value(their) for our, their in zip(ours, theirs, strict=True)]


def cpu_by_process(slices: Sequence[Slice]) -> dict[str, float]:
    """Return the median CPU time of each process and of the client, in milliseconds per run."""
    parts = {name: statistics.median(one.cpu[name] for one in slices) for name in slices[0].cpu}
    return parts | {"client": statistics.median(one.client for one in slices)}
