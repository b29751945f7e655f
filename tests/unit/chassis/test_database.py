from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
from structlog.testing import capture_logs

from pawl.chassis.process.start import StartError
from pawl.errors import DependencyUnavailable
from pawl.launcher.ports import free_port
from pawl.server.db.database import Database
from pawl.server.db.durability import require_durable
from pawl.server.db.heartbeat import Heartbeat
from pawl.server.db.idle import IdleConnections, PooledConnection, is_lost
from tests import servers
from tests.databases import forwarding, pump
from tests.poll import PATIENCE_SECONDS, until
from tests.tables import for_each


async def use(database: Database) -> None:
    await database.fetchval("SELECT 1")


async def answers(database: Database) -> bool:
    with suppress(DependencyUnavailable):
        await use(database)
        return True
    return False


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with Database(database_url, application_name="test") as database:
        yield database


SQL = "CREATE TABLE steps (n integer); INSERT INTO steps VALUES (1);"


async def test_a_schema_is_created_once_and_completely(database_url: str) -> None:
    async def start(sql: str) -> bool:
        async with Database(database_url, application_name="test") as database:
            return await database.create_schema("book", sql)

    with pytest.raises(asyncpg.PostgresError):
        await start(SQL + "SELECT nonsense;")
    assert sorted(await asyncio.gather(*(start(SQL) for _ in range(4)))) == [False, False, False, True]
    assert not await start("-- A comment.\n" + SQL)


@pytest.mark.parametrize("older", [SQL, "CREATE TABLE book.migrations (number integer)"])
async def test_a_schema_of_another_version_is_refused(database: Database, older: str) -> None:
    await database.execute("CREATE SCHEMA book")
    if older == SQL:
        await database.create_schema("book", older)
    else:
        await database.execute(older)
    with pytest.raises(StartError, match="another version of Pawl"):
        await database.create_schema("book", SQL + "CREATE TABLE more ();")
    await use(database)


async def test_server_faults_are_reported_as_unavailable_and_the_next_statement_works(database_url: str) -> None:
    """The faults are statement timeouts, broken connections, and a server that is full or cannot read its files."""
    faults = ["SELECT pg_sleep(300)", "SELECT pg_terminate_backend(pg_backend_pid())"]
    raising = "DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{}'; END $$"
    async with Database(database_url, application_name="test", statement_timeout_seconds=1) as database:
        for fault in (*faults, *(raising.format(code) for code in ("58030", "58P01", "25P03", "53100"))):
            with pytest.raises(DependencyUnavailable):
                await database.execute(fault)
            await use(database)


async def test_an_outage_is_logged_once_and_opens_no_sessions(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes, take, port = list[float](), IdleConnections.take, free_port()

    async def counted(kept: IdleConnections, deadline: float) -> PooledConnection:
        takes.append(deadline)
        return await take(kept, deadline)

    monkeypatch.setattr(IdleConnections, "take", counted)
    async with forwarding(database_url, port, pump) as url:
        database = await Database(url, application_name="test").__aenter__()
        await use(database)
    takes.clear()
    with capture_logs() as logs:
        for _ in range(20):
            with pytest.raises(DependencyUnavailable):
                await use(database)
    assert len(takes) <= 2, "one caller finds its session broken, another finds none"
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["database.lost"]
    async with forwarding(database_url, port, pump):
        await until(partial(answers, database))
    await database.__aexit__(None, None, None)


async def test_statement_errors_are_not_reported_as_unavailable(database: Database) -> None:
    with pytest.raises(asyncpg.UniqueViolationError):
        await database.execute("CREATE TABLE t (n integer PRIMARY KEY); INSERT INTO t VALUES (1), (1)")
    with pytest.raises(asyncpg.InterfaceError):
        await database.fetchval("SELECT $1::text", 1, 2)


async def test_a_start_waits_for_the_database_server(database_url: str) -> None:
    port = free_port()
    url = f"postgresql://postgres@127.0.0.1:{port}{urlsplit(database_url).path}"
    with capture_logs() as logs:
        starting = asyncio.ensure_future(Database(url, application_name="test").__aenter__())
        await until(lambda: any(line["event"] == "database.waiting" for line in logs))
        async with forwarding(database_url, port, pump):
            database = await starting
            await use(database)
            await database.__aexit__(None, None, None)


async def test_an_unusable_database_fails_the_start_with_a_clear_error(postgres_url: str, tmp_path: Path) -> None:
    for url, says in (
        (f"postgresql://postgres@/postgres?host={tmp_path}", "is PostgreSQL running at that address"),
        (urlsplit(postgres_url)._replace(path="/nowhere").geturl(), '"nowhere" does not exist'),
        ("mysql://somewhere", "PAWL_DATABASE_URL"),
    ):
        with pytest.raises(StartError, match=says):
            await Database(url, application_name="test", start_timeout_seconds=0).__aenter__()


async def test_a_closed_database_is_unavailable(database_url: str) -> None:
    async with Database(database_url, application_name="test") as database:
        pass
    with pytest.raises(DependencyUnavailable):
        await use(database)


@asynccontextmanager
async def _read_only(url: str) -> AsyncIterator[None]:
    name = urlsplit(url).path.removeprefix("/")
    admin = await asyncpg.connect(url)
    await admin.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    try:
        yield
    finally:
        await admin.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        await admin.close()


async def test_a_read_only_database_is_unavailable_and_its_sessions_are_closed(database_url: str) -> None:
    async with _read_only(database_url):
        database = await Database(database_url, application_name="test", connections_max=1).__aenter__()
        with pytest.raises(DependencyUnavailable, match="is read-only"):
            await database.ping()
        with pytest.raises(DependencyUnavailable, match="is read-only"):
            async with database.transaction() as connection:
                await connection.execute("CREATE TABLE t (n integer)")
    # The pool may have opened the next session before the database became writable again.
    with suppress(DependencyUnavailable):
        await database.execute("CREATE TABLE early (n integer)")
    await database.execute("CREATE TABLE t (n integer)")
    await database.ping()
    await database.__aexit__(None, None, None)


async def test_a_server_is_checked_only_while_a_connection_is_in_use(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = list[float]()

    async def check(_: Heartbeat) -> None:
        checks.append(asyncio.get_running_loop().time())

    monkeypatch.setattr(Heartbeat, "check", check)
    monkeypatch.setattr("pawl.server.db.heartbeat._INTERVAL_SECONDS", 0.01)
    async with Database(database_url, application_name="test", statement_timeout_seconds=1) as database:
        for _ in range(2):
            await use(database)
            checks.clear()
            await asyncio.sleep(0.1)
            assert not checks
            async with database.acquire():
                await until(lambda: bool(checks))


async def _listen(database: Database, started: asyncio.Event, thawed: asyncio.Event) -> None:
    """Hold an idle connection that does not notice when it is cut."""
    async with database.acquire(urgent=True) as connection:
        await connection.execute("LISTEN news")
        started.set()
        while thawed.is_set():
            await asyncio.sleep(0)
        await thawed.wait()
        await connection.execute("SELECT 1")


async def test_callers_do_not_hang_on_a_frozen_server(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test covers running statements, callers that wait for a connection, and later callers."""
    running = asyncio.Event()
    running.set()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await running.wait()
            writer.write(data)
        writer.close()

    unseen: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    async with (
        forwarding(database_url, free_port(), stall) as url,
        Database(url, application_name="test", connections_max=3, statement_timeout_seconds=3600) as database,
    ):
        await asyncio.gather(*(use(database) for _ in range(2)))
        listening = asyncio.Event()
        listener = asyncio.ensure_future(_listen(database, listening, running))
        await listening.wait()
        running.clear()
        with monkeypatch.context() as frozen:
            frozen.setattr("pawl.server.db.heartbeat._WINDOW_SECONDS", 0.1)
            callers = [asyncio.ensure_future(use(database)) for _ in range(5)]
            impatient = asyncio.ensure_future(use(database))
            await asyncio.sleep(0.1)
            impatient.cancel()
            ends = await asyncio.gather(*callers, return_exceptions=True)
            assert {type(end) for end in ends} == {DependencyUnavailable}
            for call in (database.ping, database.ping, partial(use, database)):
                with pytest.raises(DependencyUnavailable, match="does not answer"):
                    await call()
        running.set()
        with pytest.raises(DependencyUnavailable):
            await listener

        await until(partial(answers, database))
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []


async def test_urgent_work_gets_a_connection_despite_many_reads(database_url: str) -> None:
    ended = asyncio.Event()

    async def read() -> None:
        async with database.acquire():
            reading.append(None)
            await ended.wait()

    reading: list[None] = []
    waits: list[float] = []
    async with Database(database_url, application_name="test", connections_max=3, waited=waits.append) as database:
        readers = [asyncio.ensure_future(read()) for _ in range(4)]
        await until(lambda: len(reading) == 2)
        async with database.transaction(urgent=True) as connection:
            assert await connection.fetchval("SELECT 1") == 1
        await database.ping()
        opened = len(waits)
        ended.set()
        await asyncio.gather(*readers)
        assert len(waits) == opened + 2, "OPS-2: two readers waited for a slot"


# Kept connections, and checks for databases that may lose acknowledged commits.


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
    assert (world.in_pool, await world.take()) == (0, first)
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


@for_each("setting", ["fsync", "full_page_writes", "synchronous_commit"])
async def test_a_server_that_may_lose_commits_in_a_crash_is_refused(
    own_server: str, safe: asyncpg.Connection, setting: str
) -> None:
    """The error names only the unsafe setting."""
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
    assert [line["log_level"] for line in logs if line["event"] == "database.unsafe"] == ["warning"]
