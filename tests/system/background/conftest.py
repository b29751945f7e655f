"""One suite for all background tests of this folder, with two replicas of each service."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pawl.client import AsyncClient
from tests.system.background.world import REPLICAS, SERVICES, World, running
from tests.system.talk import Talk

pytest.register_assert_rewrite("tests.system.background.stories")


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def world() -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory(prefix="pawl-stories-") as folder:
        async with running(Path(folder), replicas=dict.fromkeys(SERVICES, REPLICAS)) as world:
            yield world


@pytest_asyncio.fixture(loop_scope="session")
async def pawl(world: World) -> AsyncIterator[AsyncClient]:
    async with world.client() as pawl:
        yield pawl


@pytest.fixture
def talk(pawl: AsyncClient) -> Talk:
    return Talk(pawl)


@pytest.fixture
def effects(tmp_path: Path) -> Path:
    return tmp_path / f"effects-{uuid.uuid4().hex}"
