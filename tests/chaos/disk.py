"""A disk that is full: PostgreSQL's data on a small tmpfs, which is made smaller than what wants to be written."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncpg

from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests.chaos.world import World

_SIZE = 2 << 30
_PAGE_BYTES = 4096
_FULL_SECONDS = 4.0


def _is_small(data: Path) -> bool:
    return (data / "postgres").is_mount()


def why_not(world: World) -> str:
    """Say why the disk cannot be filled; empty if it can."""
    return "" if _is_small(world.folder / "data") else "mounting a tmpfs for PostgreSQL needs root on Linux"


async def prepare(data: Path) -> bool:
    """Put a new PostgreSQL cluster on a tmpfs of its own; returns whether that could be done."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    async with Suite(SuiteOptions(data=data, stages=())):
        pass
    place, original = data / "postgres", data / "postgres.original"
    place.rename(original)
    place.mkdir(mode=0o700)
    mounted = subprocess.run(  # noqa: ASYNC221  # quick
        ["mount", "-t", "tmpfs", "-o", f"size={_SIZE},mode=0700", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        place.rmdir()
        original.rename(place)
        return False
    shutil.copytree(original, place, dirs_exist_ok=True)
    owner = original.stat()
    for path in (place, *place.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)
    shutil.rmtree(original)
    return True


def release(data: Path) -> None:
    """Take the tmpfs away, if there is one, with all that is on it."""
    if _is_small(data):
        subprocess.run(["umount", "--lazy", str(data / "postgres")], capture_output=True, check=True)


@contextlib.contextmanager
def _full(place: Path) -> Iterator[None]:
    found = os.statvfs(place)
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    _resize(place, used + 4 * _PAGE_BYTES)
    try:
        yield
    finally:
        _resize(place, _SIZE)


def _resize(place: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], capture_output=True, check=True)


async def fill(world: World) -> None:
    """Let nothing more be written for a while; PostgreSQL may end over it and be started again."""
    with _full(world.folder / "data" / "postgres"):
        with contextlib.suppress(asyncpg.PostgresError, OSError):
            connection = await asyncpg.connect(world.suite.database_url, timeout=2)
            # A full segment of the log needs a new one, which there is no room for.
            await connection.execute("SELECT pg_switch_wal()", timeout=2)
        await asyncio.sleep(_FULL_SECONDS)
    await world.suite.wait_ready("postgres")
