"""`python -m tests.chaos --seconds 600 --seed 7`: play the nemesis; `python -m tests.chaos recovery`: measure it."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from pawl.chassis import logs
from tests.chaos import nemesis, recovery
from tests.chaos.faults import PHASES
from tests.chaos.play import LEAST, Game, play
from tests.chaos.report import show

CONSOLE = Console()


def main() -> int:
    """Do what the command line says; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("what", nargs="?", default="play", choices=("play", "recovery", "phases"))
    parser.add_argument("--seconds", type=float, default=600, help="begin phases for so long (600)")
    parser.add_argument("--seed", type=int, help="for the choices of the nemesis and of the users (by chance)")
    parser.add_argument("--phases", help="play these alone, with commas between; `phases` lists them")
    parser.add_argument("--quiet", type=float, default=3.0, help="seconds of quiet after each phase (3)")
    parser.add_argument("--keep", type=Path, help="a folder for history, logs and report; a temporary one if not given")
    options = parser.parse_args()
    logs.configure(service="chaos", instance_id="", level="error", log_format="console")
    if options.what == "phases":
        CONSOLE.print("\n".join(phase.name for phase in PHASES), highlight=False)
        return 0
    with _folder(options.keep) as folder:
        return _recover(folder) if options.what == "recovery" else _play(options, folder)


def _tell(line: str) -> None:
    CONSOLE.print(line, highlight=False, soft_wrap=True)


def _recover(folder: Path) -> int:
    found = asyncio.run(recovery.measure(folder, _tell))
    _tell(
        f"After SIGKILL of all {found.processes_killed} processes and a restart, {found.runs} runs went on: the first "
        f"after {found.first_step_seconds} s, half of them by {found.median_step_seconds} s, the last after "
        f"{found.last_step_seconds} s. The goal is {recovery.GOAL_SECONDS:g} s."
    )
    return 1 if found.last_step_seconds > recovery.GOAL_SECONDS else 0


def _play(options: argparse.Namespace, folder: Path) -> int:
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    chosen = nemesis.named(options.phases.split(",")) if options.phases else None
    game = Game(
        seed=seed,
        phases=chosen or nemesis.forever(seed),
        seconds=None if chosen else options.seconds,
        quiet_seconds=options.quiet,
        machine_faults=True,
        least={} if chosen else {kind: round(count * max(options.seconds / 60, 1)) for kind, count in LEAST.items()},
    )
    _tell(f"seed {seed}, in {folder}")
    found = asyncio.run(play(game, folder, _tell))
    show(found, CONSOLE)
    return 1 if found.violations else 0


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="pawl-chaos-") as folder:
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
