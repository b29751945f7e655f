"""Starts and stops the services repeatedly, then runs them for long (`python -m tests.leaks`). Nothing may grow."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from pawl.server.process import log_setup
from tests.leaks.load import people, running
from tests.leaks.measure import Sample, census, grown, growths, table, take

_CYCLES_WARM = 1
_LOAD_PER_CYCLE = 12
_WINDOWS_WARM = 2
_WINDOWS = 8
# Per cycle: a service that leaks one of its parts leaks hundreds of objects.
_CYCLE_TOLERANCE = {"tasks": 0.2, "descriptors": 0.5, "threads": 0.2, "objects": 100.0, "blocks": 400.0, "kib": 1024.0}
# Per operation, half of which are runs: one object leaked per run shows as 0.5. Blocks also include
# bounded caches: agent-loop keeps its last 4,096 claims, some ten blocks each.
_TOLERANCE = {"tasks": 0.02, "descriptors": 0.02, "threads": 0.01, "objects": 0.3, "blocks": 6.0, "kib": 2.0}
# With few operations, bounded caches such as a worker's last 4,096 claims weigh more, and so does work
# that is active at one sample only: some 400 objects. A leaked run or stream has hundreds.
_SHORT_TOLERANCE = {"tasks": 0.05, "descriptors": 0.05, "threads": 0.02, "objects": 10.0, "blocks": 100.0, "kib": 20.0}
_LONG_OPERATIONS = 4000


def _say(line: object) -> None:
    print(line, flush=True)  # noqa: T201


async def _cycles(suite: Suite, folder: Path, count: int) -> list[str]:
    """Start, load and stop the services `count` times after a warm-up. One cycle counts as one operation."""
    samples: list[Sample] = []
    types = census()
    for cycle in range(_CYCLES_WARM + count):
        async with running(suite, folder) as services, people(services) as load:
            await load.work(runs=_LOAD_PER_CYCLE, streams=_LOAD_PER_CYCLE)
        samples.append(await take(cycle, samples[-1] if samples else None))
        if cycle == _CYCLES_WARM - 1:
            types = census()
    _say(table(samples))
    found = growths(samples[_CYCLES_WARM:], _CYCLE_TOLERANCE)
    _say(f"more than after the first: {grown(types, census())}")
    return [f"cycles: {growth}" for growth in found]


async def _long(suite: Suite, folder: Path, runs: int, streams: int) -> list[str]:
    """Make runs and cancelled streams in windows. The first windows are a warm-up."""
    is_long = runs + streams >= _LONG_OPERATIONS
    tolerance = _TOLERANCE if is_long else _SHORT_TOLERANCE
    samples: list[Sample] = []
    windows = _WINDOWS_WARM + (_WINDOWS if is_long else _WINDOWS // 2)
    async with running(suite, folder) as services, people(services) as load:
        types = census()
        for window in range(1, windows + 1):
            await load.work(runs=runs // windows, streams=streams // windows)
            samples.append(await take(window * (runs + streams) // windows, samples[-1] if samples else None))
            _say(samples[-1])
            if window == _WINDOWS_WARM:
                types = census()
        more = grown(types, census())
    _say(table(samples[_WINDOWS_WARM:]))
    _say(f"more than after the warm-up: {more}")
    return [f"windows: {growth}" for growth in growths(samples[_WINDOWS_WARM:], tolerance)]


async def _main(options: argparse.Namespace) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pawl-leaks-") as name:
        folder = Path(name)
        async with Suite(SuiteOptions(data=folder / "data", stages=())) as suite:
            found = await _cycles(suite, folder, options.cycles) if options.cycles else []
            if options.runs or options.streams:
                found += await _long(suite, folder, options.runs, options.streams)
    _say(
        f"{options.cycles} cycles, {options.runs} runs, {options.streams} cancelled streams"
        f" in {time.monotonic() - began:.0f} s"
    )
    for growth in found:
        _say(growth)
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.leaks", description=__doc__)
    parser.add_argument("--cycles", type=int, default=15, help="starts and stops after the first (15)")
    parser.add_argument("--runs", type=int, default=10_000, help="runs (10,000)")
    parser.add_argument("--streams", type=int, default=10_000, help="cancelled streams (10,000)")
    options = parser.parse_args()
    log_setup.configure(service="leaks", instance_id="leaks", level="warning", log_format="console")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_main(options))


if __name__ == "__main__":
    sys.exit(main())
