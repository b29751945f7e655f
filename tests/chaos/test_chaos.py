"""The short form: real processes, real faults, every checker. `make chaos` plays the long one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.chaos import faults
from tests.chaos.play import LEAST, Game, play


@pytest.mark.long
@pytest.mark.timeout(1800)  # far more than needed, even on a busy machine
async def test_acknowledged_data_survives_every_fault() -> None:
    """I1 to I15: no violation under kills, a freeze beyond the lease, a failover, no NATS and a faulty model."""
    with tempfile.TemporaryDirectory(prefix="pawl-chaos-") as folder:
        game = Game(seed=1, phases=faults.named(faults.SHORT), quiet_seconds=1.0, least=LEAST)
        found = await play(game, Path(folder))
    assert found.violations == []
    assert found.phases == list(faults.SHORT)
    assert found.counts["effects"]
    assert found.takeovers
