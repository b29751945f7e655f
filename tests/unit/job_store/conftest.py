"""In-memory ledgers for tests."""

from __future__ import annotations

import pytest

from tests.unit.job_store.desk import Desk
from tests.unit.job_store.world import World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def run_id(world: World) -> str:
    return world.start_run()


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def root(desk: Desk) -> str:
    """Return a run that a message started."""
    return desk.start_run()


@pytest.fixture
def agent(desk: Desk, root: str) -> str:
    """Return a run to which `root` has delegated a call."""
    return desk.delegate(root)


@pytest.fixture
def job(desk: Desk, root: str) -> str:
    """Return a job of `root`, which has ended."""
    return desk.job_of_ended(root)
