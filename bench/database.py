"""Access to the database of a suite on this machine, and a way to slow it down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from pawl.launcher.suite import Suite


@asynccontextmanager
async def connect(suite: Suite, *, superuser: bool = False) -> AsyncIterator[asyncpg.Connection]:
    """Connect as a service does, or as the superuser."""
    url = suite.database_url
    if superuser:
        password = (suite.folder.path / "secrets" / "postgres-superuser").read_text(encoding="utf-8").strip()
        url = f"postgresql://postgres:{password}@{suite.endpoints.postgres}/postgres"
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def slow_disk(suite: Suite, milliseconds: float) -> None:
    """Make PostgreSQL sleep before each flush of its log.

    It sleeps while holding the log's lock, as with a slow fsync. Because `commit_siblings` is 0, this also affects a
    commit without concurrent ones. Unlike a slow fsync, the flush includes data that is written to the log during the
    sleep.
    """
    async with connect(suite, superuser=True) as connection:
        await connection.execute("ALTER SYSTEM SET commit_siblings = 0")
        await connection.execute(f"ALTER SYSTEM SET commit_delay = {round(milliseconds * 1000)}")
        await connection.execute("SELECT pg_reload_conf()")
    async with connect(suite) as connection:
        for name, wanted in {"commit_siblings": "0", "fsync": "on", "synchronous_commit": "on"}.items():
            found = await connection.fetchval("SELECT current_setting($1)", name)
            if found != wanted:
                raise RuntimeError(f"{name} is {found}")
