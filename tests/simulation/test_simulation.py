"""The simulation finds no violation (I1 to I12, I16, I17) and can be repeated exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

from tests.simulation.mutants import misplaced

SHORT_SEEDS: Final = ((0, 20),)
# First seed and number of seeds.
LONG_SEEDS: Final = ((20, 100),)

# Far more than needed, even on a busy machine.
pytestmark = pytest.mark.timeout(1800)


def _run(module: str, *arguments: str, hash_seed: str = "0", allocator: str = "pymalloc") -> str:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONMALLOC": allocator}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("first", "count"), [*SHORT_SEEDS, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG_SEEDS)]
)
def test_simulation_finds_no_violation(first: int, count: int) -> None:
    _run("tests.simulation", "--first", str(first), "--count", str(count))


def test_seed_reproduces_a_simulation_exactly() -> None:
    """The processes differ in PYTHONHASHSEED and in the addresses of their objects."""
    first = _run("tests.simulation", "--seed", "3", "--trace")
    assert first == _run("tests.simulation", "--seed", "3", "--trace", hash_seed="1", allocator="malloc")
    assert first.count("\n") > 20


def test_planted_faults_are_found() -> None:
    """The test plants two of the faults; `make mutants` plants all of them."""
    found = _run("tests.simulation.mutants", "requests_are_forgotten", "any_user_may_decide")
    assert found.count(": seed ") == 2, found


def test_every_mutant_matches_its_module() -> None:
    assert misplaced() == []
