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
