"""The measurement itself: it leaves out what a pool keeps, and finds what an operation leaves behind."""

from __future__ import annotations

import asyncio

import pytest

from pawl.chassis import database as chassis_database
from pawl.chassis.database import Database
from tests.leaks import measure

_CONNECTIONS = 4
_STATEMENTS = 90


async def test_prepared_statements_do_not_count(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample is of a moment at which no connection holds any, whether it was at hand, in its pool or in use."""
    monkeypatch.setattr(chassis_database, "_ACQUIRE_TIMEOUT_SECONDS", 120.0)
    async with Database(database_url, application_name="test", connections_max=_CONNECTIONS) as database:

        async def work() -> None:
            async with database.acquire(urgent=True) as connection:
                for number in range(_STATEMENTS):
                    await connection.fetchval(f"SELECT {number}")

        # More than there are connections: some wait, so some connections go through the pool.
        async with asyncio.TaskGroup() as group:
            for _ in range(3 * _CONNECTIONS):
                group.create_task(work())
        assert _statements() > _STATEMENTS

        in_use = asyncio.create_task(database.fetchval("SELECT pg_sleep(0.5)"))
        await measure.take(0, None)

        # One is of the heartbeat, and one of the connection that was in use and may be counted as one that listens.
        assert _statements() <= 2
        await in_use
        assert await database.fetchval("SELECT 1") == 1


def _statements() -> int:
    return measure.census()["asyncpg.connection._StatementCacheEntry"]
