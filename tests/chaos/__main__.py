"""Runs one chaos test: `python -m tests.chaos --seconds 600 --seed 7`."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from functools import partial
from pathlib import Path

from pawl.server.process import log_setup
from tests.chaos import faults
from tests.chaos.play import LEAST, Game, play

_show = partial(print, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("what", nargs="?", default="play", choices=("play", "phases"))
    parser.add_argument("--seconds", type=float, default=600, help="start phases for this long (600)")
    parser.add_argument("--seed", type=int, help="for the choices of the faults and of the users (random)")
    parser.add_argument("--phases", help="play only these, separated by commas; `phases` lists them")
    parser.add_argument("--quiet", type=float, default=3.0, help="seconds of quiet after each phase (3)")
    parser.add_argument("--keep", type=Path, help="a folder for history, logs and report; a temporary one if not given")
    options = parser.parse_args()
    log_setup.configure(service="chaos", instance_id="", level="error", log_format="console")
    if options.what == "phases":
        _show("\n".join(phase.name for phase in faults.PHASES))
        return 0
    with tempfile.TemporaryDirectory(prefix="pawl-chaos-") as temporary:
        folder = Path(options.keep or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return _play(options, folder)


def _play(options: argparse.Namespace, folder: Path) -> int:
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    chosen = faults.named(options.phases.split(",")) if options.phases else None
    game = Game(
        seed=seed,
        phases=chosen or faults.forever(seed),
        seconds=None if chosen else options.seconds,
        quiet_seconds=options.quiet,
        machine_faults=True,
        least={} if chosen else {kind: round(count * max(options.seconds / 60, 1)) for kind, count in LEAST.items()},
    )
    _show(f"seed {seed}, in {folder}")
    found = asyncio.run(play(game, folder, _show))
    _show(found)
    return 1 if found.violations else 0


if __name__ == "__main__":
    sys.exit(main())
