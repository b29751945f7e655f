"""One database for all tests of the registry, emptied before each: quicker than one for each."""

from __future__ import annotations

import asyncio
import os
from urllib.parse import urlsplit

import asyncpg
import pytest

from pawl.chassis.database import Database


async def _create(postgres_url: str) -> str:
    name = f"registry_{os.urandom(6).hex()}"
    admin = await asyncpg.connect(postgres_url)
    try:
        await admin.execute(f"CREATE DATABASE {name} TEMPLATE template0")
    finally:
        await admin.close()
    url = urlsplit(postgres_url)._replace(path=f"/{name}").geturl()
    async with Database(url, application_name="test") as database:
        await database.migrate("tool_registry", "pawl.tool_registry.adapters.sql.migrations")
    return url


@pytest.fixture(scope="session")
def registry_database_url(postgres_url: str) -> str:
    """The URL of a migrated database."""
    return asyncio.run(_create(postgres_url))


@pytest.fixture
def database_url(registry_database_url: str) -> str:
    """The URL of a database whose tables are empty."""
    asyncio.run(_empty(registry_database_url))
    return registry_database_url


async def _empty(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        tables = await connection.fetch(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'tool_registry' AND tablename <> 'migrations'"
        )
        # In any order: without the foreign keys.
        deletes = "".join(f"DELETE FROM tool_registry.{row['tablename']};" for row in tables)  # noqa: S608
        await connection.execute(f"SET session_replication_role = replica; {deletes}")
    finally:
        await connection.close()
