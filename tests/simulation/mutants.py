"""Faults planted in the code, each of which a named checker must find: `make mutants`.

A checker that no mutant triggers proves nothing. A mutant replaces source text as modules are imported. It
usually changes the product. It changes the simulation if a second defence in the product would hide the fault, or if
the simulation itself keeps the promise.
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from tests.simulation.chance import fix_hashes
from tests.simulation.planted import OF_JOBS, OF_THE_LEDGER, REFERENCE_MODEL, Mutant
from tests.simulation.planted_runs import OF_RUNS
from tests.simulation.planted_starters import OF_FLOWS, OF_GOALS, OF_OUTAGES, OF_STARTERS

# Far more than one mutant takes, even on a busy machine.
_SECONDS_MAX = 1800

MUTANTS = (
    *OF_RUNS,
    *OF_THE_LEDGER,
    *OF_OUTAGES,
    *OF_JOBS,
    *OF_GOALS,
    *OF_STARTERS,
    *OF_FLOWS,
)


def play(mutant: Mutant) -> str:
    for name in [name for name in sys.modules if name.startswith(("pawl.", "tests.")) and "_pb2" not in name]:
        del sys.modules[name]
    sys.meta_path.insert(0, Finder(mutant))
    seeds = dict.fromkeys((mutant.seed, *range(mutant.seeds)))
    if mutant.checker == REFERENCE_MODEL:
        return str(importlib.import_module("tests.ledger.game").first_difference(seeds))
    simulate = importlib.import_module("tests.simulation.simulate").simulate
    # Most mutants do not need these, which cost time.
    has_triggers, has_flows = mutant in OF_STARTERS, mutant in (*OF_FLOWS, *OF_GOALS)
    for seed in seeds:
        for violation in simulate(seed, has_triggers=has_triggers, has_flows=has_flows).violations:
            if violation.startswith(f"{mutant.checker}:"):
                return f"seed {seed}: {violation}"
    return ""


def hunt(mutants: Sequence[Mutant], end: float = math.inf) -> Iterator[tuple[Mutant, str]]:
    """Play each mutant in its own process, two at a time. Yield it with its report, which is empty if it was missed.

    The processes are forks of this one, which has imported everything. Only modules that may change are imported again.
    """
    for module in ("tests.ledger.game", "tests.simulation.simulate"):
        importlib.import_module(module)
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        hunts = [(mutant, pool.apply_async(_attempt, (mutant,))) for mutant in mutants]
        for mutant, hunted in hunts:
            try:
                yield mutant, hunted.get(min(_SECONDS_MAX, max(0.0, end - time.monotonic())))
            except multiprocessing.TimeoutError:
                if time.monotonic() >= end:
                    return
                yield mutant, ""


def _attempt(mutant: Mutant) -> str:
    # A process that does not end is killed and replaced.
    signal.alarm(_SECONDS_MAX)
    try:
        return play(mutant)
    except BaseException as error:  # noqa: BLE001  # reported as a miss
        print(f"{mutant.name}: {error!r}", file=sys.stderr)  # noqa: T201
        return ""


def misplaced() -> list[str]:
    sources = {module: _source(module) for mutant in MUTANTS for module, _, _ in mutant.edits}
    return [
        f"{mutant.name}: {module} has no {text!r}"
        for mutant in MUTANTS
        for module, text, _ in mutant.edits
        if text not in sources[module]
    ]


def _source(module: str) -> str:
    path = Path(*module.split(".")).with_suffix(".py")
    (found,) = filter(Path.exists, (Path(root, path) for root in ("services", "services/pawl-client", ".")))
    return found.read_text(encoding="utf-8")


def main() -> int:
    """Play all mutants or the named ones. Return 1 if a checker missed one."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="name")
    parser.add_argument("--seconds", type=float, default=math.inf, help="play no more mutants after this time")
    parser.add_argument("--shuffle", metavar="SEED", help="play in random order")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not arguments.names or mutant.name in arguments.names]
    if arguments.shuffle:
        random.Random(arguments.shuffle).shuffle(chosen)
    end = time.monotonic() + arguments.seconds
    played = missed = 0
    for mutant, found in hunt(chosen, end):
        played += 1
        missed += not found
        print(f"{mutant.name}: {found or 'MISSED'}", flush=True)  # noqa: T201
        if found and not found.startswith(f"seed {mutant.seed}:"):
            print(f"{mutant.name}: set this seed in the mutant to find it sooner", file=sys.stderr)  # noqa: T201
        if time.monotonic() > end:
            break
    print(f"{played} of {len(chosen)} mutants played, {missed} missed")  # noqa: T201
    return 1 if missed else 0


class _Planter(SourceFileLoader):
    def __init__(self, spec: ModuleSpec, edits: Sequence[tuple[str, str]]) -> None:
        super().__init__(spec.name, str(spec.origin))
        self._edits = edits

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        for text, instead in self._edits:
            if text not in source:
                raise SystemExit(f"{fullname} has no {text!r} : update the mutant")
            source = source.replace(text, instead, 1)
        return compile(source, self.path, "exec")


class Finder(MetaPathFinder):
    """An import finder that plants a mutant. Insert it before the other finders."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        edits = [(text, instead) for module, text, instead in self._mutant.edits if module == fullname]
        spec = PathFinder.find_spec(fullname, path, target) if edits else None
        if spec is not None:
            spec.loader = _Planter(spec, edits)
        return spec


if __name__ == "__main__":
    fix_hashes("tests.simulation.mutants")
    sys.exit(main())
