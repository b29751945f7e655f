"""A clock that is wrong: a running process finds itself minutes in the future, then in the past.

`shifted_clock.c` is compiled and preloaded, so a clock of one process moves and the machine's stays.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.world import REPLICAS, SERVICES, World

_SOURCE = Path(__file__).with_name("shifted_clock.c")
_SHIFTS_SECONDS = (300, -300)
_PHASE_SECONDS = 3.0


def prepare(folder: Path) -> Mapping[str, Mapping[str, str]]:
    """Compile what shifts clocks; returns what to add to the environment of the services, nothing if it cannot be."""
    added = preload(folder)
    return dict.fromkeys(SERVICES, added) if added else {}


def preload(folder: Path) -> Mapping[str, str] | None:
    """Compile what shifts clocks; returns what to add to the environment of a process, None if it cannot be."""
    compiler = shutil.which("cc")
    library = folder / "shifted_clock.so"
    if compiler is None or sys.platform != "linux":
        return None
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return None
    _clocks(folder).mkdir()
    # PostgreSQL, for one, may run under another account.
    _clocks(folder).chmod(0o777)
    return {"LD_PRELOAD": str(library), "CHAOS_CLOCKS": str(_clocks(folder))}


def put(folder: Path, pid: int | None, seconds: float) -> None:
    """Set the clock of a process, and of those that it forks, so much forward, or back."""
    # The process has mapped the file, so it must not be empty for a moment.
    with (_clocks(folder) / str(pid)).open("r+b") as file:
        file.write(int(seconds).to_bytes(8, sys.byteorder, signed=True))


def why_not(world: World) -> str:
    """Say why no clock can be shifted; empty if one can."""
    return "" if _clocks(world.folder).exists() else "shifting the clock of a process needs Linux and a C compiler"


async def shift(world: World) -> None:
    """Set the clock of one replica of each service forward, then back, then right."""
    replicas = [(service, world.draw.randrange(REPLICAS)) for service in SERVICES]
    for seconds in (*_SHIFTS_SECONDS, 0):
        for service, replica in replicas:
            put(world.folder, world.suite.pid(service, replica), seconds)
        await asyncio.sleep(_PHASE_SECONDS)


def _clocks(folder: Path) -> Path:
    return folder / "clocks"
