"""Plays seeds of the simulation: `python -m tests.simulation --seed 7 --trace`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.chance import fix_hashes
from tests.simulation.simulate import Verdict, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this seed alone")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--count", type=int, default=500, help="how many seeds (500)")
    parser.add_argument("--jobs", type=int, default=1, help="parallel processes (1)")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--failures", type=int, default=5, help="stop after this many failed seeds (5)")
    options = parser.parse_args()
    if options.seed is not None:
        return _one(options.seed, trace=options.trace)
    return _many(range(options.first, options.first + options.count), options.jobs, options.failures)


def _one(seed: int, *, trace: bool) -> int:
    verdict = simulate(seed, printed=print if trace else None)
    print(f"seed {seed}: {verdict.trace_lines} lines, trace {verdict.trace_hash}")  # noqa: T201
    _show(verdict)
    return 1 if verdict.violations else 0


def _many(seeds: range, jobs: int, failures_max: int) -> int:
    began = time.monotonic()
    verdicts, failed = list[Verdict](), 0
    with ProcessPoolExecutor(jobs) as pool:
        for verdict in pool.map(simulate, seeds, chunksize=10):
            verdicts.append(verdict)
            _show(verdict)
            failed += bool(verdict.violations)
            if failed >= failures_max:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    faults = sum((each.faults for each in verdicts), Counter[str]())
    counts = {name: sum(getattr(each, name) for each in verdicts) for name in ("runs", "calls", "effects")}
    what = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"{len(verdicts)} seeds, {failed} failed, {what} in {time.monotonic() - began:.0f} s")  # noqa: T201
    print("faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items())))  # noqa: T201
    return 1 if failed else 0


def _show(verdict: Verdict) -> None:
    for violation in verdict.violations:
        print(f"seed {verdict.seed}: {violation}")  # noqa: T201
    if verdict.violations:
        print(f'replay: make simulate ARGS="--seed {verdict.seed} --trace"')  # noqa: T201


if __name__ == "__main__":
    fix_hashes("tests.simulation")
    sys.exit(main())
