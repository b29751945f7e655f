"""The power goes in mid-load: with the settings of `pawl up` nothing acknowledged is lost.

`Disk.make` has seen that the cut drops what was not synced.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pawl.launcher.suite import Suite
from tests.system.durability.disk import Disk
from tests.system.durability.load import People, Promise, losses
from tests.system.durability.machine import Machine

pytestmark = pytest.mark.long


@pytest.fixture
async def machine() -> AsyncIterator[tuple[Machine, Disk, Path]]:
    """A machine that was installed in good order, its disk, and a folder that the power cut spares."""
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
    """Runs of all kinds have completed, answers were taken, effects have happened, and much is under way."""
    completed = [promise for promise in promises if promise.completed]
    return (
        len(completed) >= 12
        and sum(bool(promise.answered_call_id) for promise in promises) >= 6
        and sum(promise.effect is not None for promise in completed) >= 6
        and len(completed) < len(promises)
    )


async def _work_and_cut(machine: Machine, suite: Suite, disk: Disk, effects: Path) -> list[Promise]:
    # What it would have been told is then on the stream alone.
    await suite.stop_process("notifier")
    people = People(suite, effects)
    await people.work_until(_enough, disk.cut)
    await machine.cut_power(suite)
    return people.promises


async def test_nothing_acknowledged_is_lost_when_the_power_goes(machine: tuple[Machine, Disk, Path]) -> None:
    """I1, I2, I5, I8: starts, answers, events that were shown, effects; and each end is told of once."""
    computer, disk, effects = machine
    async with computer.switched_on() as suite:
        promises = await _work_and_cut(computer, suite, disk, effects)
    async with computer.switched_on() as suite:
        assert await losses(suite, promises) == []
