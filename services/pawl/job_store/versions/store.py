"""Stores definitions and their versions in PostgreSQL."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final, NamedTuple

from asyncpg import Record

from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.job_store.ledger.reading import Page
from pawl.job_store.ledger.store import run_lists
from pawl.job_store.versions.rules import DefinitionRow, Kind, Save, VersionRow
from pawl.server.db.database import Connection, Database, affected

# The statements are built only from constants in this module.
# ruff: noqa: S608

COLUMNS: Final = "store_id, name, version, content, create_time, create_user_id, create_credential_id"
SIZE: Final = "octet_length(content)"
# Changes to a store's definitions are serialised, because their references to each other are checked together.
LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('job_store.definitions'), hashtext($1))"
_ALL: Final = """
SELECT name, version, uses, delete_time IS NOT NULL AS is_deleted FROM job_store.definitions
WHERE store_id = $1 AND kind = $2
"""
_VERSION: Final = f"""
SELECT {COLUMNS} FROM job_store.definition_versions WHERE store_id = $1 AND kind = $2 AND name = $3 AND version = $4
"""
_LIVE: Final = f"""
SELECT {COLUMNS} FROM job_store.definitions AS d JOIN job_store.definition_versions AS v
USING (store_id, kind, name, version) WHERE store_id = $1 AND kind = $2 AND name = $3 AND d.delete_time IS NULL
"""
_ADD: Final = f"INSERT INTO job_store.definition_versions (kind, {COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)"
_PUT: Final = """
INSERT INTO job_store.definitions (store_id, kind, name, version, uses) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (store_id, kind, name) DO UPDATE SET version = excluded.version, uses = excluded.uses,
    delete_time = NULL, delete_user_id = '', delete_credential_id = ''
"""
_DELETE: Final = """
UPDATE job_store.definitions SET delete_time = now(), delete_user_id = $4, delete_credential_id = $5
WHERE store_id = $1 AND kind = $2 AND name = $3 AND delete_time IS NULL
"""


class Rows(NamedTuple):
    table: str
    key: str
    names: str


_KEY: Final = "store_id, kind, name, version"
_VERSION_ROWS: Final = Rows("job_store.definition_versions", _KEY, COLUMNS)
_LIST: Final = run_lists.statement(
    _VERSION_ROWS,
    source=f"""(
        SELECT v.* FROM job_store.definitions AS d JOIN job_store.definition_versions AS v USING ({_KEY})
        WHERE d.delete_time IS NULL
    )""",
    where="store_id = $3 AND kind = $4 AND name > $5",
    order="name",
    size=SIZE,
)
_VERSIONS: Final = run_lists.statement(
    _VERSION_ROWS,
    where="store_id = $3 AND kind = $4 AND name = $5 AND version < $6",
    order="version DESC",
    size=SIZE,
)
values: Final = attrgetter(*COLUMNS.split(", "))


class PostgresVersions:
    """Stores the versions of definitions of one kind. Changes within a store are serialised."""

    def __init__(self, database: Database, kind: Kind) -> None:
        self._database = database
        self._kind = kind

    async def put(
        self, store_id: StoreId, name: str, uses: tuple[str, ...], save: Save, *, validate_only: bool
    ) -> tuple[VersionRow, bool]:
        """Store the version that `save` returns, if it is new.

        Return the version, and whether it is new.

        With `validate_only`, nothing is stored.

        Raises:
            PawlError: Any error that `save` raises.
        """
        kind = self._kind.name
        async with self._database.transaction() as connection:
            await connection.execute(LOCK, store_id)
            now = await connection.fetchval("SELECT clock_timestamp()")
            known = await self.known(connection, store_id)
            row = await connection.fetchrow(_VERSION, store_id, kind, name, known[name].version if name in known else 0)
            newest = None if row is None else read(row)
            stored = save(known, newest, now)
            if stored is newest:
                return stored, False
            if not validate_only:
                await connection.execute(_ADD, kind, *values(stored))
                await connection.execute(_PUT, store_id, kind, name, stored.version, uses)
                await self.changed(connection, store_id, name)
        return stored, True

    async def get(self, store_id: StoreId, name: str, version: int) -> VersionRow | None:
        """Return a version, or None if it does not exist.

        Version 0 is the newest version unless the definition is deleted.
        """
        key = (store_id, self._kind.name, name)
        if version:
            row = await self._database.fetchrow(_VERSION, *key, version)
        else:
            row = await self._database.fetchrow(_LIVE, *key)
        return None if row is None else read(row)

    async def list(self, store_id: StoreId, *, after: str, rows_max: int) -> Page[VersionRow]:
        """Return the newest versions that are not deleted, sorted by name, starting after `after`."""
        arguments = (store_id, self._kind.name, after)
        return await run_lists.fetch(self._database, _LIST, arguments, read, rows_max=rows_max)

    async def versions(self, store_id: StoreId, name: str, *, before: int, rows_max: int) -> Page[VersionRow]:
        """Return a definition's versions with numbers below `before`, newest first."""
        arguments = (store_id, self._kind.name, name, before)
        return await run_lists.fetch(self._database, _VERSIONS, arguments, read, rows_max=rows_max)

    async def delete(self, store_id: StoreId, name: str, user_id: UserId, credential_id: CredentialId) -> bool:
        """Mark a definition as deleted. Return False if it does not exist."""
        async with self._database.transaction() as connection:
            await connection.execute(LOCK, store_id)
            done = await connection.execute(_DELETE, store_id, self._kind.name, name, user_id, credential_id)
            await self.changed(connection, store_id, name)
        return bool(affected(done))

    async def known(self, connection: Connection, store_id: StoreId) -> dict[str, DefinitionRow]:
        """Return the store's definitions of this kind by name, including deleted ones."""
        rows = await connection.fetch(_ALL, store_id, self._kind.name)
        return {row["name"]: DefinitionRow(**dict(row) | {"uses": tuple(row["uses"])}) for row in rows}

    async def changed(self, connection: Connection, store_id: StoreId, name: str) -> None:
        """Update everything that depends on a definition, in the transaction that has changed it."""


def read(row: Record) -> VersionRow:
    fields: dict[str, Any] = dict(row)
    fields.pop("found", None)
    return VersionRow(**fields)
