"""The short form: real processes, real faults, every checker. `make chaos` plays the long form.

Each checker finds its planted fault, and no checker finds a fault in a good record.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.chaos import faults
from tests.chaos.checkers import CHECKERS, judge
from tests.chaos.history import Kind
from tests.chaos.mutants import MUTANTS, hunt
from tests.chaos.play import LEAST, Game, play, too_little
from tests.chaos.story import good_record


@pytest.mark.long
@pytest.mark.timeout(1800)  # far more than needed, even on a busy machine
async def test_acknowledged_data_survives_every_fault() -> None:
    """I1 to I15: no violation with kills, a freeze longer than the lease, a failover, no NATS, and a faulty model."""
    with tempfile.TemporaryDirectory(prefix="pawl-chaos-") as folder:
        game = Game(seed=1, phases=faults.named(faults.SHORT), quiet_seconds=1.0, least=LEAST)
        found = await play(game, Path(folder))
    assert found.violations == []
    assert found.phases == list(faults.SHORT)
    assert found.counts["effects"]
    assert found.takeovers


def test_checkers_accept_a_good_record() -> None:
    assert judge(good_record()) == []


def test_each_checker_alone_finds_its_planted_fault() -> None:
    assert [name for name in MUTANTS if not hunt(name)] == []
    assert sorted(MUTANTS) == sorted(checker.__name__ for checker in CHECKERS)


def test_too_few_operations_are_a_violation() -> None:
    assert list(too_little(good_record(), {Kind.START: 5})) == []
    assert list(too_little(good_record(), {Kind.START: 6}))
