"""Databases that may lose what they acknowledged."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
from structlog.testing import capture_logs

from pawl.chassis.database import Database
from pawl.chassis.durability import require_durable
from pawl.chassis.start import StartError
from tests import servers
from tests.poll import until


@pytest.fixture(scope="module")
def own_server() -> Iterator[str]:
    """A PostgreSQL with its own defaults, which are safe."""
    with tempfile.TemporaryDirectory(prefix="pawl-safe-") as folder, servers.postgres(Path(folder), "") as url:
        yield url


@pytest.fixture
async def safe(own_server: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to it as superuser; what a test sets with ALTER SYSTEM is undone."""
    admin = await asyncpg.connect(own_server)
    yield admin
    await admin.execute("ALTER SYSTEM RESET ALL")
    await reload(admin, off=0)
    await admin.close()


async def reload(admin: asyncpg.Connection, *, off: int) -> None:
    """Let the server read its configuration; returns when so many of the settings are off, for later sessions too."""
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


async def test_a_database_whose_commits_wait_for_the_disk_of_this_server_is_taken(
    own_server: str, safe: asyncpg.Connection
) -> None:
    with capture_logs() as logs:
        await check(own_server)
        for value in ("local", "remote_write", "remote_apply"):
            await check(f"{own_server}&synchronous_commit={value}")
    assert logs == []


async def test_a_server_that_does_not_wait_for_its_disk_is_refused(own_server: str, safe: asyncpg.Connection) -> None:
    """The sentence names the setting, and nothing that is in order."""
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):
        await safe.execute("ALTER SYSTEM RESET ALL")
        await safe.execute(f"ALTER SYSTEM SET {setting} = off")
        await reload(safe, off=1)
        said = await refusal(own_server)
        assert (f"{setting} is off" in said, said.count(" is off")) == (True, 1), said


async def test_a_setting_of_the_role_the_database_or_the_url_is_found(
    own_server: str, safe: asyncpg.Connection
) -> None:
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


async def test_an_unsafe_database_is_used_where_that_is_wanted_and_the_log_says_so(database_url: str) -> None:
    """The other tests use one: it is quicker."""
    assert (await refusal(database_url)).count(" is off") == 3
    with capture_logs() as logs:
        await check(database_url, unsafe_allowed=True)
    (line,) = [line for line in logs if line["event"] == "database.unsafe"]
    assert line["log_level"] == "warning"
