from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
from structlog.testing import capture_logs

from pawl.chassis.database import Database
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
    async with database.acquire() as connection:
        await connection.execute("SELECT 1")


ONE = "CREATE TABLE steps (n integer); INSERT INTO steps VALUES (1);"
TWO = "INSERT INTO steps VALUES (2);"
INDEX = "DROP INDEX IF EXISTS steps_n;\nCREATE INDEX CONCURRENTLY steps_n ON steps (n);\n"


async def test_what_a_transaction_did_is_undone_when_it_fails(database_url: str) -> None:
    async with Database(database_url, application_name="test") as database:
        async with database.acquire() as connection:
            await connection.execute("CREATE TABLE t (n integer)")
        with pytest.raises(asyncpg.DivisionByZeroError):
            async with database.transaction() as connection:
                await connection.execute("INSERT INTO t VALUES (1); SELECT 1/0")
        async with database.transaction() as connection:
            assert await connection.fetchval("SELECT count(*) FROM t") == 0


async def test_migrations_are_applied_once_and_in_order(database_url: str, tmp_path: Path) -> None:
    folder = migrations(tmp_path / "m", ONE, TWO)
    async with Database(database_url, application_name="test") as database:
        assert await database.migrate("book", folder) == 2
        assert await database.migrate("book", folder) == 0
        async with database.acquire() as connection:
            rows = await connection.fetch("SELECT n FROM book.steps ORDER BY n")
            names = await connection.fetch("SELECT number, name FROM book.migrations ORDER BY number")
    assert [row["n"] for row in rows] == [1, 2]
    assert [tuple(row) for row in names] == [(1, "0001_step.sql"), (2, "0002_step.sql")]


@pytest.mark.parametrize("second", [TWO, INDEX], ids=["rows", "an index"])
async def test_processes_that_start_together_take_turns(database_url: str, tmp_path: Path, second: str) -> None:
    folder = migrations(tmp_path / "m", ONE, second)

    async def start() -> int:
        async with Database(database_url, application_name="test") as database:
            return await database.migrate("book", folder)

    assert sorted(await asyncio.gather(*(start() for _ in range(4)))) == [0, 0, 0, 2]


async def test_a_changed_migration_refuses_to_start(database_url: str, tmp_path: Path) -> None:
    async with Database(database_url, application_name="test") as database:
        await database.migrate("book", migrations(tmp_path / "m", ONE))
        with pytest.raises(StartError, match="must never change"):
            await database.migrate("book", migrations(tmp_path / "m", ONE + "\n-- and more", TWO))
        await use(database)


async def test_a_newer_database_is_accepted(database_url: str, tmp_path: Path) -> None:
    """I23: version N-1 starts on the database of version N."""
    async with Database(database_url, application_name="test") as database:
        await database.migrate("book", migrations(tmp_path / "new", ONE, TWO))
        assert await database.migrate("book", migrations(tmp_path / "old", ONE)) == 0


async def test_a_migration_that_fails_leaves_nothing_behind(database_url: str, tmp_path: Path) -> None:
    async with Database(database_url, application_name="test") as database:
        with pytest.raises(StartError, match="0002_step"):
            await database.migrate("book", migrations(tmp_path / "m", ONE, TWO + "SELECT nonsense;"))
        assert await database.migrate("book", migrations(tmp_path / "m", ONE, TWO)) == 1


async def test_a_migration_behind_a_long_reader_holds_up_nobody_else(database_url: str, tmp_path: Path) -> None:
    backup, other = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'"
    async with Database(database_url, application_name="test") as database:
        await database.migrate("book", migrations(tmp_path / "m", ONE))
        async with backup.transaction():
            await backup.fetch("SELECT * FROM book.steps")
            both = migrations(tmp_path / "m", ONE, "ALTER TABLE steps ADD COLUMN m integer")
            migrating = asyncio.ensure_future(database.migrate("book", both))

            async def waits() -> bool:
                return bool(await other.fetchval(waiting))

            await until(waits)
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
            monkeypatch.setattr("pawl.chassis.migrations._PATIENCE_SECONDS", 3.0)
            with pytest.raises(StartError, match="pg_stat_activity"):
                await database.migrate("book", both)
            monkeypatch.undo()
        assert await other.fetchval(valid) is False
        assert await database.migrate("book", both) == 1
        assert await other.fetchval(valid)
    await backup.close()
    await other.close()


@pytest.mark.parametrize("name", ["0002_gap.sql", "1_short.sql", "0001_Big.sql"])
async def test_a_misnamed_migration_is_a_fault_of_ours(database_url: str, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(ONE)
    async with Database(database_url, application_name="test") as database:
        with pytest.raises(ValueError, match="migration"):
            await database.migrate("book", tmp_path)


async def test_a_statement_that_takes_too_long_is_cut_off(database_url: str) -> None:
    async with Database(database_url, application_name="test", statement_timeout_seconds=0.05) as database:
        with pytest.raises(DependencyUnavailable):
            async with database.acquire() as connection:
                await connection.execute("SELECT pg_sleep(30)")
        await use(database)


async def test_a_connection_that_breaks_is_unavailable_and_the_next_one_works(database_url: str) -> None:
    async with Database(database_url, application_name="test") as database:
        with pytest.raises(DependencyUnavailable):
            async with database.transaction() as connection:
                await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        await use(database)


async def test_a_server_that_said_goodbye_and_has_not_hung_up_is_unavailable_and_the_next_is_not(
    database_url: str, free_port: int
) -> None:
    said = asyncio.Event()

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        said.set()

    async with (
        forwarding(database_url, free_port, say) as url,
        Database(url, application_name="leaving", connections_max=1) as database,
        Database(database_url, application_name="test") as other,
    ):
        async with other.acquire() as connection:
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'leaving'"
            )
        await said.wait()
        for _ in range(10):
            await asyncio.sleep(0)  # What was said is read.
        with pytest.raises(DependencyUnavailable):
            await use(database)
        await use(database)


async def test_a_session_that_is_being_opened_while_all_expire_is_not_kept(database_url: str, free_port: int) -> None:
    """It may be one with the old primary, which was reached a moment ago."""
    opening: list[Database] = []

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            for database in opening:
                await database._renew()
            writer.write(data)
        writer.close()

    async with (
        forwarding(database_url, free_port, say) as url,
        Database(url, application_name="test", connections_max=1) as database,
    ):
        await database._renew()
        opening.append(database)
        async with database.acquire() as connection:
            old = connection.get_server_pid()
        opening.clear()
        async with database.acquire() as connection:
            assert connection.get_server_pid() != old


@pytest.mark.parametrize("turns", range(5))
async def test_a_caller_that_goes_away_in_a_statement_leaves_a_connection_that_works(
    database_url: str, free_port: int, turns: int
) -> None:
    """Also between its two halves, of which the driver has sent one."""
    asking: list[asyncio.Task[object]] = []

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            if asking:
                for _ in range(turns):
                    await asyncio.sleep(0)
                asking.pop().cancel()
        writer.close()

    async with (
        forwarding(database_url, free_port, cut) as url,
        Database(url, application_name="test", connections_max=1) as database,
    ):

        async def ask() -> None:
            async with database.acquire() as connection:
                await connection.fetchval("SELECT count(*) FROM pg_class WHERE relname = $1", "none")

        await use(database)
        asking.append(asyncio.ensure_future(ask()))
        await asyncio.wait(asking)
        async with (
            database.acquire() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            assert await connection.fetchval("SELECT 1") == 1


async def test_errors_of_sql_are_not_taken_for_an_absent_database(database_url: str) -> None:
    async with Database(database_url, application_name="test") as database:
        with pytest.raises(asyncpg.UniqueViolationError):
            async with database.transaction() as connection:
                await connection.execute("CREATE TABLE t (n integer PRIMARY KEY); INSERT INTO t VALUES (1), (1)")


async def test_a_wrong_argument_is_not_taken_for_an_absent_database(database_url: str) -> None:
    async with Database(database_url, application_name="test") as database:
        with pytest.raises(asyncpg.InterfaceError):
            async with database.transaction() as connection:
                await connection.fetchval("SELECT $1::text", 1, 2)


async def test_a_start_waits_for_a_server_that_comes_later(database_url: str, free_port: int) -> None:
    url = f"postgresql://postgres@127.0.0.1:{free_port}{urlsplit(database_url).path}"
    with capture_logs() as logs:
        starting = asyncio.ensure_future(Database(url, application_name="test").__aenter__())
        while not any(line["event"] == "database.waiting" for line in logs):
            await asyncio.sleep(0.01)
        async with forwarding(database_url, free_port, pump):
            database = await starting
            await use(database)
            await database.__aexit__(None, None, None)


@pytest.fixture(name="free_port")
def _free_port() -> int:
    return free_port()


async def test_without_a_server_start_ends_with_a_sentence(tmp_path: Path) -> None:
    database = Database(
        f"postgresql://postgres@/postgres?host={tmp_path}", application_name="test", start_timeout_seconds=0
    )
    with pytest.raises(StartError, match="is PostgreSQL running at that address"):
        await database.__aenter__()


async def test_a_database_that_does_not_exist_is_told_at_once(postgres_url: str) -> None:
    url = urlsplit(postgres_url)._replace(path="/nowhere").geturl()
    with pytest.raises(StartError, match='"nowhere" does not exist'):
        await Database(url, application_name="test").__aenter__()


async def test_a_url_of_another_form_is_told_at_once() -> None:
    with pytest.raises(StartError, match="PAWL_DATABASE_URL"):
        await Database("mysql://somewhere", application_name="test").__aenter__()


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


async def test_a_database_that_lets_nobody_in_any_more_is_unavailable(postgres_url: str, database_url: str) -> None:
    """The operator has to mend it; no request is at fault."""
    name = urlsplit(database_url).path.removeprefix("/")
    admin = await asyncpg.connect(postgres_url)
    async with Database(database_url, application_name="test", connections_max=1) as database:
        await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
        for _ in range(3):
            with pytest.raises(DependencyUnavailable):
                await use(database)
        await admin.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        await use(database)
    await admin.close()


@pytest.mark.parametrize("code", ["58030", "58P01", "25P03", "53100"])
async def test_a_server_that_cannot_read_its_files_or_is_full_is_unavailable(database_url: str, code: str) -> None:
    async with Database(database_url, application_name="test") as database:
        with pytest.raises(DependencyUnavailable):
            async with database.acquire() as connection:
                await connection.execute(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$")
        await use(database)


async def test_a_migration_in_between_is_no_fault_of_a_request(database_url: str) -> None:
    async with Database(database_url, application_name="test", connections_max=1) as database:
        async with database.acquire() as connection:
            await connection.execute("CREATE TABLE t (n integer)")
            await connection.fetch("SELECT * FROM t")
        admin = await asyncpg.connect(database_url)
        await admin.execute("ALTER TABLE t ADD COLUMN m integer")
        await admin.close()
        with pytest.raises(DependencyUnavailable):
            async with database.transaction() as connection:
                await connection.fetch("SELECT * FROM t")
        async with database.transaction() as connection:
            await connection.fetch("SELECT * FROM t")


async def _listen(database: Database, begun: asyncio.Event, thawed: asyncio.Event) -> None:
    """Hold a connection and ask nothing, so that nothing says that it was cut."""
    async with database.acquire(urgent=True) as connection:
        await connection.execute("LISTEN news")
        begun.set()
        while thawed.is_set():
            await asyncio.sleep(0)
        await thawed.wait()
        await connection.execute("SELECT 1")


async def test_nobody_waits_for_a_server_that_is_frozen(database_url: str, free_port: int) -> None:
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
        forwarding(database_url, free_port, stall) as url,
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
        for ended in await asyncio.gather(*callers, return_exceptions=True):
            assert isinstance(ended, DependencyUnavailable)
        for _ in range(2):
            with pytest.raises(DependencyUnavailable, match="does not answer"):
                await database.ping()
        with pytest.raises(DependencyUnavailable, match="does not answer"):
            await use(database)
        running.set()
        with pytest.raises(DependencyUnavailable):
            await listener

        async def answers() -> bool:
            try:
                await use(database)
            except DependencyUnavailable:
                return False
            return True

        await until(answers)
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
        while len(reading) < 2:
            await asyncio.sleep(0.001)
        async with database.transaction(urgent=True) as connection:
            assert await connection.fetchval("SELECT 1") == 1
        await database.ping()
        ended.set()
        await asyncio.gather(*readers)
