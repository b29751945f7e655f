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

from pawl.chassis.database import Database
from pawl.chassis.database_kept import KeptConnections, Lent
from pawl.chassis.migrations import read_migrations
from pawl.chassis.start import StartError
from pawl.chassis.tasks import end
from pawl.errors import DependencyUnavailable
from pawl.launcher.ports import free_port
from tests.databases import forwarding, pump
from tests.poll import until


def migrations(folder: Path, *texts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts, 1):
        (folder / f"{number:04}_step.sql").write_text(text)
    return folder


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


ONE = "CREATE TABLE steps (n integer); INSERT INTO steps VALUES (1);"
TWO = "INSERT INTO steps VALUES (2);"
INDEX = "DROP INDEX IF EXISTS steps_n;\nCREATE INDEX CONCURRENTLY steps_n ON steps (n);\n"


async def test_migrations_are_applied_once_and_in_order(database: Database, tmp_path: Path) -> None:
    """I23: version N-1 starts on the database of version N; one that fails leaves nothing behind."""
    with pytest.raises(StartError, match="0002_step"):
        await database.migrate("book", migrations(tmp_path / "m", ONE, TWO + "SELECT nonsense;"))
    folder = migrations(tmp_path / "m", ONE, TWO)
    assert [await database.migrate("book", folder) for _ in range(2)] == [1, 0]
    assert await database.migrate("book", migrations(tmp_path / "old", ONE)) == 0
    rows = await database.fetch("SELECT n FROM book.steps ORDER BY n")
    names = await database.fetch("SELECT number, name FROM book.migrations ORDER BY number")
    assert [row["n"] for row in rows] == [1, 2]
    assert [tuple(row) for row in names] == [(1, "0001_step.sql"), (2, "0002_step.sql")]


@pytest.mark.parametrize("second", [TWO, INDEX], ids=["rows", "an index"])
async def test_processes_that_start_together_take_turns(database_url: str, tmp_path: Path, second: str) -> None:
    folder = migrations(tmp_path / "m", ONE, second)

    async def start() -> int:
        async with Database(database_url, application_name="test") as database:
            return await database.migrate("book", folder)

    assert sorted(await asyncio.gather(*(start() for _ in range(4)))) == [0, 0, 0, 2]


async def test_a_changed_migration_refuses_to_start(database: Database, tmp_path: Path) -> None:
    await database.migrate("book", migrations(tmp_path / "m", ONE))
    with pytest.raises(StartError, match="must never change"):
        await database.migrate("book", migrations(tmp_path / "m", ONE + "\n-- and more", TWO))
    await use(database)


async def test_a_migration_behind_a_long_reader_holds_up_nobody_else(database_url: str, tmp_path: Path) -> None:
    backup, other = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'"
    async with Database(database_url, application_name="test") as database:
        await database.migrate("book", migrations(tmp_path / "m", ONE))
        async with backup.transaction():
            await backup.fetch("SELECT * FROM book.steps")
            both = migrations(tmp_path / "m", ONE, "ALTER TABLE steps ADD COLUMN m integer")
            migrating = asyncio.ensure_future(database.migrate("book", both))

            await until(lambda: other.fetchval(waiting))
            await other.execute("INSERT INTO book.steps VALUES (2)", timeout=40)
            assert not migrating.done()
        assert await migrating == 1
    await backup.close()
    await other.close()


async def test_an_index_is_built_beside_writers_and_anew_if_that_was_cut_off(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, other = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
    valid = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass('book.steps_n')"
    async with Database(database_url, application_name="test") as database:
        await database.migrate("book", migrations(tmp_path / "m", ONE))
        both = migrations(tmp_path / "m", ONE, INDEX)
        async with backup.transaction(isolation="repeatable_read"):
            await backup.fetch("SELECT * FROM book.steps")
            migrating = asyncio.ensure_future(database.migrate("book", both))

            async def is_built() -> bool:
                return await other.fetchval(valid) is False

            await until(is_built)
            await other.execute("INSERT INTO book.steps VALUES (2)", timeout=40)
            await end([migrating])
            monkeypatch.setattr("pawl.chassis.migrations._PATIENCE_SECONDS", 1.0)
            with pytest.raises(StartError, match="pg_stat_activity"):
                await database.migrate("book", both)
            monkeypatch.undo()
        assert await other.fetchval(valid) is False
        assert await database.migrate("book", both) == 1
        assert await other.fetchval(valid)
    await backup.close()
    await other.close()


def test_a_misnamed_migration_is_a_fault_of_ours(tmp_path: Path) -> None:
    for name in ("0002_gap.sql", "1_short.sql", "0001_Big.sql"):
        folder = migrations(tmp_path / name)
        (folder / name).write_text(ONE)
        with pytest.raises(ValueError, match="migration"):
            read_migrations(folder)


async def test_faults_of_the_server_are_unavailable_and_the_next_statement_works(database_url: str) -> None:
    """A statement that takes too long, a connection that breaks, a server that is full or cannot read its files."""
    faults = ["SELECT pg_sleep(300)", "SELECT pg_terminate_backend(pg_backend_pid())"]
    raising = "DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{}'; END $$"
    async with Database(database_url, application_name="test", statement_timeout_seconds=1) as database:
        for fault in (*faults, *(raising.format(code) for code in ("58030", "58P01", "25P03", "53100"))):
            with pytest.raises(DependencyUnavailable):
                await database.execute(fault)
            await use(database)


async def test_while_the_server_is_away_one_line_says_so_and_no_caller_opens_a_session(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes, take, port = list[float](), KeptConnections.take, free_port()

    async def counted(kept: KeptConnections, deadline: float) -> Lent:
        takes.append(deadline)
        return await take(kept, deadline)

    monkeypatch.setattr(KeptConnections, "take", counted)
    async with forwarding(database_url, port, pump) as url:
        database = await Database(url, application_name="test").__aenter__()
        await use(database)
    takes.clear()
    with capture_logs() as logs:
        for _ in range(20):
            with pytest.raises(DependencyUnavailable):
                await use(database)
    assert len(takes) <= 2, "the first finds its session broken, and another one that there are no others"
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["database.lost"]
    async with forwarding(database_url, port, pump):
        await until(partial(answers, database))
    await database.__aexit__(None, None, None)


async def test_faults_of_a_statement_are_not_taken_for_an_absent_database(database: Database) -> None:
    with pytest.raises(asyncpg.UniqueViolationError):
        await database.execute("CREATE TABLE t (n integer PRIMARY KEY); INSERT INTO t VALUES (1), (1)")
    with pytest.raises(asyncpg.InterfaceError):
        await database.fetchval("SELECT $1::text", 1, 2)


async def test_a_start_waits_for_a_server_that_comes_later(database_url: str) -> None:
    port = free_port()
    url = f"postgresql://postgres@127.0.0.1:{port}{urlsplit(database_url).path}"
    with capture_logs() as logs:
        starting = asyncio.ensure_future(Database(url, application_name="test").__aenter__())
        await until(lambda: any(line["event"] == "database.waiting" for line in logs))
        async with forwarding(database_url, port, pump):
            database = await starting
            await use(database)
            await database.__aexit__(None, None, None)


async def test_a_database_that_cannot_be_opened_ends_the_start_with_a_sentence(
    postgres_url: str, tmp_path: Path
) -> None:
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
    """Have new sessions take no writes, as those of a standby."""
    name = urlsplit(url).path.removeprefix("/")
    admin = await asyncpg.connect(url)
    await admin.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    try:
        yield
    finally:
        await admin.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        await admin.close()


async def test_a_database_that_takes_no_writes_is_unavailable_and_its_sessions_are_not_kept(database_url: str) -> None:
    async with _read_only(database_url):
        database = await Database(database_url, application_name="test", connections_max=1).__aenter__()
        with pytest.raises(DependencyUnavailable, match="takes no writes"):
            await database.ping()
        with pytest.raises(DependencyUnavailable, match="takes no writes"):
            async with database.transaction() as connection:
                await connection.execute("CREATE TABLE t (n integer)")
    # The pool may have opened the next session before the database took writes again.
    with suppress(DependencyUnavailable):
        await database.execute("CREATE TABLE early (n integer)")
    await database.execute("CREATE TABLE t (n integer)")
    await database.ping()
    await database.__aexit__(None, None, None)


async def _listen(database: Database, begun: asyncio.Event, thawed: asyncio.Event) -> None:
    """Hold a connection and ask nothing, so that nothing says that it was cut."""
    async with database.acquire(urgent=True) as connection:
        await connection.execute("LISTEN news")
        begun.set()
        while thawed.is_set():
            await asyncio.sleep(0)
        await thawed.wait()
        await connection.execute("SELECT 1")


async def test_nobody_waits_for_a_server_that_is_frozen(database_url: str) -> None:
    """Neither those who have asked already, nor those who wait for a connection, nor those who come later."""
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
        callers = [asyncio.ensure_future(use(database)) for _ in range(5)]
        impatient = asyncio.ensure_future(use(database))
        await asyncio.sleep(0.1)
        impatient.cancel()
        ends = await asyncio.gather(*callers, return_exceptions=True)
        assert {type(end) for end in ends} == {DependencyUnavailable}
        for _ in range(2):
            with pytest.raises(DependencyUnavailable, match="does not answer"):
                await database.ping()
        with pytest.raises(DependencyUnavailable, match="does not answer"):
            await use(database)
        running.set()
        with pytest.raises(DependencyUnavailable):
            await listener

        await until(partial(answers, database))
    gc.collect()
    await asyncio.sleep(0)
    assert unseen == []


async def test_what_is_urgent_finds_a_connection_beside_any_number_of_reads(database_url: str) -> None:
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
