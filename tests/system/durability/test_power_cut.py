"""After a power cut under load, with the settings of `pawl up`, no acknowledged data is lost.

`Disk.make` checks that the cut drops unsynced data.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pawl.launcher.suite import Suite
from tests.system.durability.load import Promise, Users, losses
from tests.system.durability.machine import Disk, Machine

pytestmark = pytest.mark.long


@pytest.fixture
async def machine() -> AsyncIterator[tuple[Machine, Disk, Path]]:
    """An installed machine, its disk, and a folder that survives the power cut."""
    with tempfile.TemporaryDirectory(prefix="pawl-power-") as name:
        folder = Path(name)
        disk = Disk(folder)
        try:
            problem = disk.make()
            if problem:
                pytest.skip(problem)
            machine = Machine(folder, disk)
            await machine.install()
            spared = folder / "effects"
            spared.mkdir()
            yield machine, disk, spared
        finally:
            await disk.unmount()


def _enough(promises: list[Promise]) -> bool:
    """Return whether enough runs completed, answers were accepted and effects happened while other runs are open."""
    completed = [promise for promise in promises if promise.completed]
    return (
        len(completed) >= 12
        and sum(bool(promise.answered_call_id) for promise in promises) >= 6
        and sum(promise.effect is not None for promise in completed) >= 6
        and len(completed) < len(promises)
    )


async def _work_and_cut(machine: Machine, suite: Suite, disk: Disk, effects: Path) -> list[Promise]:
    # At that point its notifications are only in the stream.
    await suite.stop_process("notifier")
    people = Users(suite, effects)
    await people.work_until(_enough, disk.cut)
    await machine.cut_power(suite)
    return people.promises


async def test_power_cut_loses_no_acknowledged_data(machine: tuple[Machine, Disk, Path]) -> None:
    """I1, I2, I5, I8: starts, answers, shown events and effects are kept, and each end is reported once."""
    computer, disk, effects = machine
    async with computer.switched_on() as suite:
        promises = await _work_and_cut(computer, suite, disk, effects)
    async with computer.switched_on() as suite:
        assert await losses(suite, promises) == []
