"""After a power cut under load, with the settings of `pawl up`, no acknowledged data is lost.

`Disk.make` checks that the cut drops unsynced data.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

import psutil
import pytest

from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests.chaos.faults import Phase
from tests.chaos.history import Kind
from tests.chaos.play import Game, play
from tests.chaos.world import REPLICAS, SERVICES, World
from tests.poll import until
from tests.servers import open_folder
from tests.system.durability.disk import Disk

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# PostgreSQL and JetStream are on the disk. Logs, effects and the history of the clients survive.
ON_DISK = ("postgres", "nats")
EFFECTS_MIN = 20


def power_cut(disk: Disk) -> Phase:
    names = [*((name, 0) for name in ON_DISK), *itertools.product(SERVICES, range(REPLICAS))]

    async def play(world: World) -> None:
        for replica in range(REPLICAS):
            # At the cut, its notifications are only in the stream.
            await world.suite.stop_process("notifier", replica)
        # The launcher would write the configuration of the servers again.
        disk.sync()
        before = len(world.effects.happened())
        await until(lambda: len(world.effects.happened()) >= before + EFFECTS_MIN)
        running = processes(world.suite, names)
        for process in running:
            process.suspend()
        disk.cut()
        stopping = asyncio.gather(*(world.suite.stop_process(*name) for name in names))
        while not stopping.done():
            # Repeated, because the launcher may be starting a process at that moment.
            for process in {*running, *processes(world.suite, names)}:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            await asyncio.sleep(0.01)
        await stopping
        await disk.unmount()
        disk.mount()
        for name in names:
            await world.suite.start_process(*name)

    return Phase(name="cut power", kind="power", play=play)


def processes(suite: Suite, names: list[tuple[str, int]]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for name in names:
        with suppress(psutil.NoSuchProcess):
            if (process_id := suite.pid(*name)) is not None:
                leader = psutil.Process(process_id)
                found += [leader, *leader.children(recursive=True)]
    return found


async def test_acknowledged_data_survives_a_power_cut() -> None:
    """I1, I2, I5, I8: starts, answers, shown events and effects are kept, and each end is notified once."""
    with open_folder() as folder:
        disk = Disk(folder)
        try:
            if problem := disk.make():
                pytest.skip(problem)
            async with Suite(SuiteOptions(data=folder / "data", scripted_model=False, stages=())):
                pass
            # PostgreSQL's account must be able to reach the folder.
            disk.place.chmod(0o711)
            for part in ON_DISK:
                disk.take(folder / "data" / part)
            game = Game(seed=1, phases=[power_cut(disk)], quiet_seconds=1.0, least={Kind.START: 10, Kind.ANSWER: 1})
            found = await play(game, folder)
        finally:
            await disk.unmount()
    assert found.violations == []
    assert found.takeovers
