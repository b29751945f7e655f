"""Kept connections, and checks for databases that may lose acknowledged commits."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
from structlog.testing import capture_logs

from pawl.chassis.process.start import StartError
from pawl.server.db.database import Database
from pawl.server.db.durability import require_durable
from pawl.server.db.idle import IdleConnections, PooledConnection, is_lost
from tests import servers
from tests.poll import PATIENCE_SECONDS, until

_MAX = 2


class World:
    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self.pool = pool
        self.kept = IdleConnections(pool)

    async def take(self) -> PooledConnection:
        connection = await self.kept.take(asyncio.get_running_loop().time() + PATIENCE_SECONDS)
        assert await connection.fetchval("SELECT 1") == 1
        return connection

    async def give(self, connection: PooledConnection, *, generation: int | None = None, is_fit: bool = True) -> None:
        generation = self.kept.generation if generation is None else generation
        await self.kept.give(connection, generation=generation, is_fit=is_fit)

    @property
    def in_pool(self) -> int:
        return self.pool.get_idle_size()


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    async with asyncpg.create_pool(database_url, min_size=1, max_size=_MAX) as pool:
        world = World(pool)
        yield world
        await world.kept.close()


async def test_a_connection_is_kept_unless_it_failed_or_the_pool_closes(world: World) -> None:
    first = await world.take()
    await world.give(first)
    assert world.in_pool == 0
    assert await world.take() is first
    await world.give(first, is_fit=False)
    assert world.in_pool == 1
    at_hand, busy = await world.take(), await world.take()
    await world.give(at_hand)
    await world.kept.close()
    assert world.in_pool == 1
    await world.give(busy)
    assert world.in_pool == _MAX


async def test_a_kept_connection_that_broke_is_not_reused(world: World) -> None:
    broken, other = await world.take(), await world.take()
    pid = broken.get_server_pid()
    await world.give(broken)
    await other.execute("SELECT pg_terminate_backend($1)", pid)
    await until(lambda: is_lost(broken))
    next_one = await world.take()
    assert next_one.get_server_pid() != pid
    for connection in (next_one, other):
        await world.give(connection)


async def test_expired_connections_are_not_reused(world: World) -> None:
    generation = world.kept.generation
    at_hand, busy = await world.take(), await world.take()
    old = {at_hand.get_server_pid(), busy.get_server_pid()}
    await world.give(at_hand)
    await world.kept.expire()
    await world.give(busy, generation=generation)
    new = [await world.take() for _ in range(_MAX)]
    assert not old & {connection.get_server_pid() for connection in new}
    for connection in new:
        await world.give(connection)


@pytest.fixture(scope="module")
def own_server() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pawl-safe-") as folder, servers.postgres(Path(folder), "") as url:
        yield url


@pytest.fixture
async def safe(own_server: str) -> AsyncIterator[asyncpg.Connection]:
    """A superuser connection to `own_server`. Settings from ALTER SYSTEM are reset after the test."""
    admin = await asyncpg.connect(own_server)
    yield admin
    await admin.execute("ALTER SYSTEM RESET ALL")
    await reload(admin, off=0)
    await admin.close()


async def reload(admin: asyncpg.Connection, *, off: int) -> None:
    """Reload the configuration and wait until `off` of the checked settings are off for new sessions."""
    await admin.execute("SELECT pg_reload_conf()")
    settings = ["fsync", "full_page_writes", "synchronous_commit"]
    count = "SELECT count(*) FROM pg_settings WHERE name = ANY ($1::text[]) AND setting = 'off'"

    async def has_read_it() -> bool:
        return bool(await admin.fetchval(count, settings) == off)

    await until(has_read_it)


async def check(url: str, *, unsafe_allowed: bool = False) -> None:
    async with Database(url, application_name="test") as database:
        await require_durable(database, unsafe_allowed=unsafe_allowed)


async def refusal(url: str) -> str:
    with pytest.raises(StartError) as raised:
        await check(url)
    return str(raised.value)


async def test_a_database_that_commits_to_disk_is_accepted(own_server: str, safe: asyncpg.Connection) -> None:
    with capture_logs() as logs:
        await check(own_server)
        for value in ("local", "remote_write", "remote_apply"):
            await check(f"{own_server}&synchronous_commit={value}")
    assert logs == []


async def test_a_server_that_may_lose_commits_in_a_crash_is_refused(own_server: str, safe: asyncpg.Connection) -> None:
    """The error names only the unsafe setting."""
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):
        await safe.execute("ALTER SYSTEM RESET ALL")
        await safe.execute(f"ALTER SYSTEM SET {setting} = off")
        await reload(safe, off=1)
        message = await refusal(own_server)
        assert (f"{setting} is off" in message, message.count(" is off")) == (True, 1), message


async def test_unsafe_role_database_and_url_settings_are_detected(own_server: str, safe: asyncpg.Connection) -> None:
    await safe.execute("CREATE ROLE lax LOGIN SUPERUSER")
    url = urlsplit(own_server)
    url = url._replace(netloc=url.netloc.replace("postgres", "lax", 1))
    assert "DATABASE_URL" in await refusal(f"{url.geturl()}&synchronous_commit=off")
    for target, remedy in (("ROLE lax", "ALTER ROLE"), ("DATABASE postgres", "ALTER DATABASE")):
        await check(url.geturl())
        await safe.execute(f"ALTER {target} SET synchronous_commit = off")
        try:
            assert remedy in await refusal(url.geturl())
        finally:
            await safe.execute(f"ALTER {target} RESET synchronous_commit")


async def test_an_allowed_unsafe_database_is_used_with_a_warning(database_url: str) -> None:
    """Other tests allow an unsafe database, because it is faster."""
    assert (await refusal(database_url)).count(" is off") == 3
    with capture_logs() as logs:
        await check(database_url, unsafe_allowed=True)
    (line,) = [line for line in logs if line["event"] == "database.unsafe"]
    assert line["log_level"] == "warning"
