"""`python -m bench`: measures Pawl against its targets and its peers, prints tables and writes bench/results."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import uvloop

from bench import gate, report
from bench.comparison import SUBJECTS
from bench.figures import Figure, NotMeasured
from bench.options import Options
from bench.processes import others_cpu_seconds

_REASON_MAX: Final = 300
# Far more time than any part needs. It prevents a part that hangs from blocking the others.
_PART_SECONDS_MAX: Final = 3600.0

Measure = Callable[[Options], Awaitable[list[Figure | NotMeasured]]]


@dataclass(frozen=True, slots=True)
class Part:
    """Figures that are measured together. `module` has `async def measure(options)`, which starts what it needs."""

    codes: tuple[str, ...]
    module: str


PARTS: Final = tuple(
    part
    for part in (
        Part(("P1", "P2"), "bench.comparison"),
        Part(("P3",), "bench.latency"),
        Part(("P4",), "bench.output"),
        Part(("P5", "P8"), "bench.ledger"),
        Part(("P6",), "bench.burst"),
        Part(("P7",), "bench.crowds"),
        Part(("P9",), "bench.memory"),
        Part(("P10",), "bench.overload"),
        Part(("P10",), "bench.neighbours"),
        Part(("P11",), "bench.replicas"),
        Part(("P12",), "bench.audit"),
        Part(("P13",), "bench.schedules"),
        Part(("P14",), "bench.deliveries"),
        Part(("P15",), "bench.series"),
        Part(("P16",), "bench.gateway"),
        Part(("P17",), "bench.rounds"),
        Part(("P18",), "bench.flows"),
        Part(("P19",), "bench.unreliable"),
        Part(("P20",), "bench.growth"),
    )
    if importlib.util.find_spec(part.module)
)
CODES: Final = tuple(dict.fromkeys(code for part in PARTS for code in part.codes))


def chosen_parts(codes: Sequence[str]) -> list[Part]:
    """Return the parts that measure these figures, or all parts if `codes` is empty."""
    return [part for part in PARTS if not codes or set(part.codes) & set(codes)]


def shortened(error: Exception) -> str:
    """Return the error in one line. The traceback is written to standard error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_REASON_MAX]


async def run(parts: Sequence[Part], options: Options, machine: report.Machine) -> list[Figure | NotMeasured]:
    """Measure the parts in sequence. A part that fails is reported and does not stop the others.

    Add the number of cores that other programs used to `machine`. Their load affects absolute times, but hardly any
    ratios.
    """
    found: list[Figure | NotMeasured] = []
    for part in parts:
        print(f"{' '.join(part.codes)}: {part.module} ...", end=" ", file=sys.stderr, flush=True)
        began, others = time.monotonic(), others_cpu_seconds()
        try:
            measure: Measure = importlib.import_module(part.module).measure
            async with asyncio.timeout(_PART_SECONDS_MAX + options.soak_seconds):
                found += await measure(options)
        except Exception as error:  # noqa: BLE001  # measure the other parts after any error
            traceback.print_exc()
            found += [NotMeasured(code=code, why=shortened(error)) for code in part.codes]
        took = time.monotonic() - began
        cores = (others_cpu_seconds() - others) / took
        machine[f"other_programs_cores_{part.module.removeprefix('bench.')}"] = round(cores, 2)
        print(f"{took:.0f} s; other programs used {cores:.1f} cores", file=sys.stderr)
    return found


def read_arguments() -> tuple[list[Part], Options] | None:
    """Return the parts to measure and their options, or None if the gate should be checked."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("figures", nargs="*", help=f"of {', '.join(CODES)}; default: all")
    parser.add_argument("--subjects", help=f"subjects of the comparison, separated by commas: {', '.join(SUBJECTS)}")
    parser.add_argument("--turns", type=int, help="turns of each subject in the comparison; default 12")
    parser.add_argument(
        "--runs", type=int, default=64, help="runs of a subject per turn, a quarter of it if sequential; default 64"
    )
    parser.add_argument("--at-once", type=int, default=32, help="concurrent runs in the comparison; default 32")
    parser.add_argument(
        "--sync-milliseconds", type=float, default=4.0, help="added to each sync on the slow disk; default 4"
    )
    parser.add_argument("--soak-seconds", type=float, help="duration of the memory test; default 180")
    parser.add_argument("--gate", action="store_true", help="only check the CPU of a run against bench/gate.json")
    parser.add_argument("--quick", action="store_true", help="short forms of all parts; peers only if named")
    given = parser.parse_args()
    if given.gate:
        return None
    if unknown := set(given.figures) - set(CODES):
        parser.error(f"no such figure: {', '.join(sorted(unknown))}")
    quick: bool = given.quick
    default = ["handwritten", "pawl"] if quick else list(SUBJECTS)
    subjects = given.subjects.split(",") if given.subjects else default
    if unknown := set(subjects) - set(SUBJECTS):
        parser.error(f"no such subject: {', '.join(sorted(unknown))}")
    options = Options(
        subjects=tuple(subjects),
        turns=given.turns or (4 if quick else 12),
        runs=given.runs,
        at_once=given.at_once,
        sync_milliseconds=given.sync_milliseconds,
        soak_seconds=given.soak_seconds or (30.0 if quick else 180.0),
        quick=quick,
    )
    return chosen_parts(given.figures), options


def main() -> None:
    selected = read_arguments()
    if selected is None:
        sys.exit(not uvloop.run(gate.passes()))
    parts, options = selected
    machine = report.machine()
    figures = uvloop.run(run(parts, options, machine))
    report.show(figures, machine)
    whole = parts == list(PARTS) and set(options.subjects) == set(SUBJECTS) and not options.quick
    for file in report.write(figures, machine, options, whole=whole):
        print(file)


if __name__ == "__main__":
    main()
