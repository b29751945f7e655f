from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests import databases
from tests.rpc.tool_registry.mcp_world import McpRegistry, mcp_registry


@pytest.fixture(scope="session")
def registry_database(postgres_url: str) -> Iterator[databases.ServiceDatabase]:
    with databases.ServiceDatabase(postgres_url, "tool_registry") as database:
        yield database


@pytest.fixture
def database_url(registry_database: databases.ServiceDatabase) -> str:
    registry_database.empty()
    return registry_database.url


@pytest.fixture
async def mcp(database_url: str, tmp_path: Path) -> AsyncIterator[McpRegistry]:
    async with mcp_registry(database_url, tmp_path, secrets={"acme": {"token": "s3cret-token"}}) as made:
        yield made
