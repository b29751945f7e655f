"""Numbered migrations: each applied once, in order, by whichever process is first.

A source is a package or a folder with files `0001_create_runs.sql`. What was
applied is in the table `<schema>.migrations`, with a checksum.

A migration that waits for a lock has everybody else wait behind it, so it waits a
moment only, gives way, and tries again: a backup holds up the new version, not
the old one that runs.

One with CREATE INDEX CONCURRENTLY, for tables that may be large, has its
statements carried out one by one, outside of a transaction, and from the first on
again if it is cut off: it begins with dropping what it makes. The one after it
puts these indexes in place of others, which takes a moment.

A database that knows more migrations than the code is accepted: version N-1 runs
on beside N. So a migration must leave what N-1 does working.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, TypeAlias

import asyncpg

from pawl.chassis import database_rights, logs
from pawl.chassis.start import StartError

if TYPE_CHECKING:
    from pawl.chassis.database import Connection
    from pawl.chassis.database_rights import Rights

Source: TypeAlias = str | ModuleType | Path
"""The name of a package, the package, or a folder."""

_FILE: Final = re.compile(r"(?P<number>[0-9]{4})_[a-z0-9_]+\.sql")
_CONCURRENTLY: Final = " CONCURRENTLY "
_STATEMENT_END: Final = re.compile(r";\s*(?:\n|$)")
_LOCK_SECONDS: Final = 1
_TURN_SECONDS: Final = 0.2
_WAY_SECONDS: Final = 3.0
_PATIENCE_SECONDS: Final = 3600.0
_SCHEMA: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One file of a source."""

    number: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        """Return the SHA-256 of the text, in hex, the same on every platform."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


def read_migrations(source: Source) -> list[Migration]:
    """Return the migrations of `source`, in order.

    Raises:
        ValueError: a file has another name, or the numbers have a gap.
    """
    folder: Traversable = source if isinstance(source, Path) else resources.files(source)
    migrations = []
    for file in folder.iterdir():
        if not file.name.endswith(".sql"):
            continue
        match = _FILE.fullmatch(file.name)
        if match is None:
            raise ValueError(f"{file.name}: a migration is named like 0001_create_runs.sql")
        migrations.append(
            Migration(
                number=int(match["number"]),
                name=file.name,
                sql=file.read_text(encoding="utf-8").replace("\r\n", "\n"),
            )
        )
    migrations.sort(key=lambda migration: migration.number)
    if [migration.number for migration in migrations] != list(range(1, len(migrations) + 1)):
        raise ValueError(f"the numbers of the migrations in {source} must be 1, 2, 3 and so on")
    return migrations


async def migrate(connection: Connection, schema: str, known: Sequence[Migration], rights: Rights | None = None) -> int:
    """Bring `schema` to the newest of the known migrations, each in a transaction of its own; returns how many it took.

    `rights` are given at the end, unless the database is newer: which of its tables only grow is not known then.

    Raises:
        StartError: an applied migration has changed, one fails, or the role of the connection may not do that.
    """
    if not _SCHEMA.fullmatch(schema):
        raise ValueError(f"{schema!r} is not the name of a schema")
    # No timeout of the pool holds for migrations: they may wait for each other,
    # and may take long.
    await connection.execute("SET statement_timeout = 0", timeout=None)
    taken, give_up = 0, asyncio.get_running_loop().time() + _PATIENCE_SECONDS
    try:
        while True:
            async with _turn(connection, schema):
                applied = await _read_applied(connection, schema)
                _refuse_changes(schema, known, applied)
                for migration in known[len(applied) :]:
                    if not await _apply(connection, schema, migration, give_up):
                        break
                    taken += 1
                else:
                    if rights is not None and len(applied) <= len(known):
                        await database_rights.give(connection, schema, rights)
                    return taken
            await asyncio.sleep(_WAY_SECONDS)
    except (asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedObjectError) as error:
        raise StartError(
            f"schema {schema}: {error}: PAWL_DATABASE_OWNER_URL, or PAWL_DATABASE_URL without it, must be of the role"
            " that owns this schema (deploy/postgres-roles.sh makes such roles)"
        ) from error
    finally:
        await connection.execute("RESET statement_timeout")


@asynccontextmanager
async def _turn(connection: Connection, schema: str) -> AsyncIterator[None]:
    """Hold the lock on the migrations of a schema. Who waits for it asks anew: indexes wait for statements to end."""
    lock = "(hashtext('pawl.migrations'), hashtext($1))"
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while not await connection.fetchval(f"SELECT pg_try_advisory_lock{lock}", schema):  # noqa: ASYNC110  # elsewhere
            await asyncio.sleep(_TURN_SECONDS)
    try:
        yield
    finally:
        await connection.execute(f"SELECT pg_advisory_unlock{lock}", schema)


async def _read_applied(connection: Connection, schema: str) -> list[tuple[str, str]]:
    async with connection.transaction():
        # Where the schema is made for the role beforehand, the role need not be one that may make schemas.
        if not await connection.fetchval("SELECT to_regnamespace($1) IS NOT NULL", schema):
            await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        # Nor one that may make tables, where there is nothing left to do.
        if not await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", f"{schema}.migrations"):
            await connection.execute(
                f"CREATE TABLE IF NOT EXISTS {schema}.migrations ("
                " number integer PRIMARY KEY, name text NOT NULL, checksum text NOT NULL,"
                " applied_at timestamptz NOT NULL DEFAULT now())"
            )
        rows = await connection.fetch(
            f"SELECT name, checksum FROM {schema}.migrations ORDER BY number"  # noqa: S608  # checked
        )
    return [(row["name"], row["checksum"]) for row in rows]


def _refuse_changes(schema: str, known: Sequence[Migration], applied: list[tuple[str, str]]) -> None:
    for migration, (name, checksum) in zip(known, applied, strict=False):
        if migration.checksum != checksum:
            raise StartError(
                f"migration {schema}/{migration.name} differs from {name} that this database has:"
                " applied migrations must never change, add a new one"
            )
    if len(applied) > len(known):
        _log.info("database.newer", schema=schema, applied=len(applied), known=len(known))


async def _apply(connection: Connection, schema: str, migration: Migration, give_up: float) -> bool:
    """Apply a migration; False if it is to give way."""
    attempt = _attempt_one_by_one if _CONCURRENTLY in migration.sql else _attempt
    try:
        await attempt(connection, schema, migration)
    except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError, TimeoutError) as error:
        if asyncio.get_running_loop().time() > give_up:
            raise StartError(
                f"migration {schema}/{migration.name} does not get its locks:"
                " end the transactions that pg_stat_activity shows as old, and start again"
            ) from error
        _log.warning("database.migration_waits", schema=schema, migration=migration.name)
        return False
    except asyncpg.PostgresError as error:
        raise StartError(f"migration {schema}/{migration.name} fails: {error}") from error
    _log.info("database.migrated", schema=schema, migration=migration.name)
    return True


async def _attempt(connection: Connection, schema: str, migration: Migration) -> None:
    async with connection.transaction():
        await connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'")
        await connection.execute(f"SET LOCAL search_path = {schema}, public")
        await connection.execute(migration.sql, timeout=_PATIENCE_SECONDS)
        await _note(connection, schema, migration)


async def _attempt_one_by_one(connection: Connection, schema: str, migration: Migration) -> None:
    await connection.execute(f"SET search_path = {schema}, public")
    try:
        for statement in filter(str.strip, _STATEMENT_END.split(migration.sql)):
            # What is built beside everybody else may wait for them: nobody waits behind it.
            seconds = 0 if _CONCURRENTLY in statement else _LOCK_SECONDS
            await connection.execute(f"SET lock_timeout = '{seconds}s'")
            await connection.execute(statement, timeout=_PATIENCE_SECONDS)
        await _note(connection, schema, migration)
    finally:
        await connection.execute("RESET search_path; RESET lock_timeout")


async def _note(connection: Connection, schema: str, migration: Migration) -> None:
    await connection.execute(
        f"INSERT INTO {schema}.migrations (number, name, checksum) VALUES ($1, $2, $3)",  # noqa: S608
        migration.number,
        migration.name,
        migration.checksum,
    )
