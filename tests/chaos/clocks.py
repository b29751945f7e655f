"""Moves the clock of a running process forward by minutes, then backward.

It compiles and preloads `shifted_clock.c`, so that only the clock of one process changes.
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
    """Compile the library. Return the variables for each service.

    If the library cannot be compiled here, return no variables.
    """
    added = preload(folder)
    return dict.fromkeys(SERVICES, added) if added else {}


def preload(folder: Path) -> Mapping[str, str] | None:
    """Compile the library and return the variables for a process, or None if that is not possible here."""
    compiler = shutil.which("cc")
    library = folder / "shifted_clock.so"
    if compiler is None or sys.platform != "linux":
        return None
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return None
    _clocks(folder).mkdir()
    # Some processes, such as PostgreSQL, may run under another account.
    _clocks(folder).chmod(0o777)
    return {"LD_PRELOAD": str(library), "CHAOS_CLOCKS": str(_clocks(folder))}


def put(folder: Path, pid: int | None, seconds: float) -> None:
    """Shift the clock of a process and its forks, forward or back."""
    # The process has mapped the file, so it must never be empty.
    with (_clocks(folder) / str(pid)).open("r+b") as file:
        file.write(int(seconds).to_bytes(8, sys.byteorder, signed=True))


def why_not(world: World) -> str:
    """Return why no clock can be shifted, or an empty string if clocks can be shifted."""
    return "" if _clocks(world.folder).exists() else "shifting the clock of a process needs Linux and a C compiler"


async def shift(world: World) -> None:
    """Shift the clock of one replica of each service forward, then backward, and reset it."""
    replicas = [(service, world.draw.randrange(REPLICAS)) for service in SERVICES]
    for seconds in (*_SHIFTS_SECONDS, 0):
        for service, replica in replicas:
            put(world.folder, world.suite.pid(service, replica), seconds)
        await asyncio.sleep(_PHASE_SECONDS)


def _clocks(folder: Path) -> Path:
    return folder / "clocks"
