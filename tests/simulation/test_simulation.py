"""The simulation keeps what is promised (I1 to I12, I16, I17), and replays."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

from tests.simulation.mutants import hunt, misplaced

SHORT_SEEDS: Final = ((0, 20),)
LONG_SEEDS: Final = ((20, 30), *((first, 50) for first in range(50, 350, 50)))
"""The first of some seeds, and how many."""

# Far beyond what they take, also on a machine that is busy with other things.
pytestmark = pytest.mark.timeout(1800)


def _play(*options: str, hash_seed: str = "0", allocator: str = "pymalloc") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *options]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONMALLOC": allocator}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("first", "count"), [*SHORT_SEEDS, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG_SEEDS)]
)
def test_no_promise_is_broken(first: int, count: int) -> None:
    played = _play("--first", str(first), "--count", str(count))
    assert played.returncode == 0, played.stdout + played.stderr


@pytest.mark.parametrize("seed", ["3", pytest.param("33", marks=pytest.mark.long)])
def test_a_seed_replays_exactly(seed: str) -> None:
    """Also from a process that begins with other hashes, and has its objects at other addresses."""
    first = _play("--seed", seed, "--trace").stdout
    second = _play("--seed", seed, "--trace", hash_seed="1", allocator="malloc").stdout
    assert first == second
    assert first.count("\n") > 20


@pytest.mark.parametrize(
    "name",
    [
        "requests_are_forgotten",
        "anybody_may_decide",
        pytest.param("parked_runs_sleep_on", marks=pytest.mark.long),
        pytest.param("changes_lose_what_is_due", marks=pytest.mark.long),
    ],
)
def test_a_planted_fault_is_found(name: str) -> None:
    assert hunt(name)


def test_every_fault_can_still_be_planted() -> None:
    """`make mutants` plays them all."""
    assert misplaced() == []
