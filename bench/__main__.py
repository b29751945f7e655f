"""`python -m bench`: Pawl and its peers do the same runs in turn; prints one table and writes it to bench/results."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench import report
from bench.environments import Unavailable
from bench.processes import cpu_seconds
from bench.subjects import Pawl, Peer, Subject

SUBJECTS: Final[dict[str, Callable[[Path, str], Subject]]] = {
    "pawl": Pawl,
    "handwritten": lambda data, model: Peer("hand-written loop", "handwritten", data, model),
    "langgraph-postgres": lambda data, model: Peer("LangGraph, PostgreSQL", "langgraph", data, model, database=True),
    "langgraph-sqlite": lambda data, model: Peer("LangGraph, SQLite", "langgraph", data, model),
    "agents-sdk": lambda data, model: Peer("OpenAI Agents SDK, SQLite", "agents_sdk", data, model),
    "dbos": lambda data, model: Peer("DBOS, PostgreSQL", "dbos", data, model, database=True),
    "restate": lambda data, model: Peer("Restate", "restate", data, model),
}


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


@asynccontextmanager
async def model_server(**options: float) -> AsyncIterator[str]:
    """Run the canned model server; gives its URL."""
    arguments = [f"--{name.replace('_', '-')}={value:g}" for name, value in options.items()]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.model", *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.wait()


async def measure(subject: Subject, measured: Measured, *, runs: int, at_once: int) -> None:
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


async def compare(chosen: Sequence[str], *, runs: int, at_once: int, repetitions: int) -> list[Measured]:
    """Let all chosen subjects do the same in turn, several times."""
    subjects: list[tuple[Subject, Measured]] = []
    async with AsyncExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pawl-bench-")))
        data.chmod(0o755)
        url = await stack.enter_async_context(model_server())
        for name in chosen:
            try:
                subject = await stack.enter_async_context(SUBJECTS[name](data / name, url))
            except Unavailable as error:
                print(f"{name} is not measured: {error}", file=sys.stderr)
                continue
            await subject.run(at_once * 2, at_once)
            subjects.append((subject, Measured(subject.name)))
        for _ in range(repetitions):
            for subject, measured in subjects:
                await measure(subject, measured, runs=runs, at_once=at_once)
    return [measured for _, measured in subjects]


def main() -> None:
    """Measure what the arguments choose."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("subjects", nargs="*", default=list(SUBJECTS), help=f"of {', '.join(SUBJECTS)}; default: all")
    parser.add_argument("--runs", type=int, default=200, help="runs of each subject in each repetition")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    if unknown := set(options.subjects) - set(SUBJECTS):
        parser.error(f"no such subject: {', '.join(sorted(unknown))}")
    measured = asyncio.run(
        compare(options.subjects, runs=options.runs, at_once=options.at_once, repetitions=options.repetitions)
    )
    report.show(measured, at_once=options.at_once)
    print(f"All figures: {report.write(measured, runs=options.runs, at_once=options.at_once)}")


if __name__ == "__main__":
    main()
