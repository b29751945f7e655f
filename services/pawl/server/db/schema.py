"""Creates a service's schema from its `schema.sql`.

There are no migrations before release 0.1. A service refuses a database that another version created.
"""

from __future__ import annotations

import hashlib
import re
from importlib import resources
from typing import TYPE_CHECKING, Final

import asyncpg

from pawl.chassis.process import logs
from pawl.chassis.process.start import StartError
from pawl.server.db import rights as database_rights

if TYPE_CHECKING:
    from pawl.server.db.database import Connection
    from pawl.server.db.rights import Rights

_SCHEMA: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")
_COMMENT: Final = re.compile(r"--.*$", re.MULTILINE)

_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('pawl.schema'), hashtext($1))"
_SECONDS_MAX: Final = 600.0

_log = logs.get_logger(__name__)


def read(schema: str) -> str:
    return (resources.files(f"pawl.{schema}") / "schema.sql").read_text(encoding="utf-8")


async def create(connection: Connection, schema: str, sql: str, rights: Rights | None = None) -> bool:
    """Create the schema unless it exists, and grant `rights` on it. Return whether the schema was created.

    Atomic, and safe to call from several processes concurrently.

    Raises:
        StartError: Another version created the schema, or the connection's role may not create it.
    """
    if not _SCHEMA.fullmatch(schema):
        raise ValueError(f"{schema!r} is not a valid schema name")
    version = hashlib.sha256(" ".join(_COMMENT.sub("", sql).split()).encode()).hexdigest()
    try:
        async with connection.transaction():
            await connection.execute("SET LOCAL statement_timeout = 0")
            await connection.execute(_LOCK, schema, timeout=_SECONDS_MAX)
            created = not await _exists(connection, schema, version)
            if created:
                await _create(connection, schema, sql, version)
            if rights is not None:
                await database_rights.give(connection, schema, rights)
    except (asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedObjectError) as error:
        raise StartError(
            f"schema {schema}: {error}: PAWL_DATABASE_OWNER_URL, or PAWL_DATABASE_URL without it, must use the role"
            " that owns this schema (deploy/postgres-roles.sh makes such roles)"
        ) from error
    if created:
        _log.info("database.schema_created", schema=schema)
    return created


async def _exists(connection: Connection, schema: str, version: str) -> bool:
    """Return whether the schema has tables.

    Raises:
        StartError: Another version created the tables.
    """
    tables = "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace($1) AND relkind IN ('r', 'p')"
    names = [row["relname"] for row in await connection.fetch(tables, schema)]
    if not names:
        return False
    found = None
    if "schema_version" in names:
        found = await connection.fetchval(f"SELECT version FROM {schema}.schema_version")  # noqa: S608  # checked
    if found != version:
        raise StartError(
            f"schema {schema} of this database was created by another version of Pawl, and before release 0.1 there"
            " are no migrations: start with an empty database (for `pawl up`: move the data folder away)"
        )
    return True


async def _create(connection: Connection, schema: str, sql: str, version: str) -> None:
    # An administrator may have created the schema for a role without the privilege.
    if not await connection.fetchval("SELECT to_regnamespace($1) IS NOT NULL", schema):
        await connection.execute(f"CREATE SCHEMA {schema}")
    await connection.execute(f"CREATE TABLE {schema}.schema_version (version text NOT NULL)")
    await connection.execute(f"INSERT INTO {schema}.schema_version (version) VALUES ($1)", version)  # noqa: S608
    await connection.execute(f"SET LOCAL search_path = {schema}, public")
    await connection.execute(sql, timeout=_SECONDS_MAX)
