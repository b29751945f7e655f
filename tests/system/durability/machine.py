"""A machine that can be switched off abruptly: a suite whose database files are on a disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import psutil

from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.service import stages
from tests.system.durability.disk import Disk

_ON_DISK = ("postgres", "nats")


class Machine:
    """The files of PostgreSQL and JetStream are on `disk`. Logs and notes are not, because they need not be durable."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._data = folder / "data"
        self._disk = disk

    async def install(self) -> None:
        async with Suite(SuiteOptions(data=self._data, scripted_model=False, stages=())):
            pass
        # PostgreSQL's account must be able to reach the folder.
        self._disk.place.chmod(0o711)
        for name in _ON_DISK:
            original, place = self._data / name, self._disk.place / name
            shutil.copytree(original, place)
            owner = original.stat()
            for path in (place, *place.rglob("*")):
                os.chown(path, owner.st_uid, owner.st_gid)
            shutil.rmtree(original)
            original.symlink_to(place)
        self._disk.sync()

    @contextlib.asynccontextmanager
    async def switched_on(self) -> AsyncIterator[Suite]:
        options = SuiteOptions(
            data=self._data,
            local_key=LOCAL_KEY,
            # Other replicas take over runs sooner than by default.
            stages=stages(agent_loop={"lease_seconds": 3.0, "lease_renew_seconds": 1.0}),
            service_environment={"tool-registry": {"PAWL_TOOLS": "tests.system.suite.slow_tools"}},
        )
        async with Suite(options) as suite:
            yield suite

    async def cut_power(self, suite: Suite) -> None:
        stopping = asyncio.create_task(suite.stop())
        while not stopping.done():
            # Repeated, because the launcher may be starting a process at that moment.
            for process in _all_of(suite):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            await asyncio.sleep(0.01)
        await stopping
        await self._disk.unmount()
        self._disk.mount()


def _all_of(suite: Suite) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in suite._processes.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid is not None:
                leader = psutil.Process(process.pid)
                found += [leader, *leader.children(recursive=True)]
    return found
