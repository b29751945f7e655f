from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
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
from pawl.server.db.heartbeat import Heartbeat
from pawl.server.db.idle import IdleConnections, PooledConnection
from tests.databases import forwarding, pump
from tests.poll import until


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


async def test_server_faults_are_unavailable_and_the_next_statement_works(database_url: str) -> None:
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
        await use(database)
        await asyncio.sleep(0.1)
        assert not checks
        async with database.acquire():
            await until(lambda: bool(checks))
        checks.clear()
        await asyncio.sleep(0.1)
        assert not checks


async def _listen(database: Database, started: asyncio.Event, thawed: asyncio.Event) -> None:
    """Hold an idle connection that does not notice when it is cut."""
    async with database.acquire(urgent=True) as connection:
        await connection.execute("LISTEN news")
        started.set()
        while thawed.is_set():
            await asyncio.sleep(0)
        await thawed.wait()
        await connection.execute("SELECT 1")


async def test_no_caller_hangs_on_a_frozen_server(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    async with Database(database_url, application_name="test", connections_max=3) as database:
        readers = [asyncio.ensure_future(read()) for _ in range(4)]
        await until(lambda: len(reading) == 2)
        async with database.transaction(urgent=True) as connection:
            assert await connection.fetchval("SELECT 1") == 1
        await database.ping()
        ended.set()
        await asyncio.gather(*readers)
