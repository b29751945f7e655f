"""Stores agents in PostgreSQL."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final, NamedTuple

from asyncpg import Record

from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.job_store.agents.rules import AgentRow, AgentVersionRow, Save, SaveDraft
from pawl.job_store.ledger.reading import Page
from pawl.job_store.ledger.store import run_lists
from pawl.server.db.database import Connection, Database, affected
from pawl.values import RunState, WaitKind

# The statements are built only from constants in this module.
# ruff: noqa: S608

_KEY: Final = "store_id, name, version"
_COLUMNS: Final = f"{_KEY}, definition, tool_names, create_time, create_user_id, create_credential_id"
_SIZE: Final = "octet_length(definition) + 64 * cardinality(tool_names)"
# Changes to a store's agents are serialised, because delegations are checked as a whole.
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('job_store.agents'), hashtext($1))"
_AGENTS: Final = """
SELECT name, version, delegates_to, delete_time IS NOT NULL AS is_deleted FROM job_store.agents WHERE store_id = $1
"""
_VERSION: Final = f"SELECT {_COLUMNS} FROM job_store.agent_versions WHERE store_id = $1 AND name = $2 AND version = $3"
_LIVE: Final = f"""
SELECT {_COLUMNS} FROM job_store.agents AS a JOIN job_store.agent_versions AS v USING ({_KEY})
WHERE store_id = $1 AND name = $2 AND a.delete_time IS NULL
"""
_ADD: Final = f"INSERT INTO job_store.agent_versions ({_COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)"
_PUT: Final = """
INSERT INTO job_store.agents (store_id, name, version, delegates_to) VALUES ($1, $2, $3, $4)
ON CONFLICT (store_id, name) DO UPDATE SET version = excluded.version, delegates_to = excluded.delegates_to,
    delete_time = NULL, delete_user_id = '', delete_credential_id = ''
"""
# Wake the runs that wait for the agent's daily quota, which may have been changed or removed.
_WAKE: Final = f"""
WITH waiting AS MATERIALIZED (
    SELECT store_id, run_id FROM job_store.runs
    WHERE store_id = $1 AND state = {RunState.WAITING.value} AND agent_name = $2 AND worker_id IS NULL
    AND waits = $3 AND claim_at > now()
    ORDER BY store_id, run_id FOR UPDATE
)
UPDATE job_store.runs AS r SET claim_at = now() FROM waiting AS w
WHERE r.store_id = w.store_id AND r.run_id = w.run_id
"""
_DELETE: Final = """
UPDATE job_store.agents SET delete_time = now(), delete_user_id = $3, delete_credential_id = $4
WHERE store_id = $1 AND name = $2 AND delete_time IS NULL
"""
_DRAFT_COLUMNS: Final = f"{_KEY}, definition, tool_names, create_time, user_id AS create_user_id, create_credential_id"
_DRAFTS: Final = f"SELECT {_DRAFT_COLUMNS} FROM job_store.agent_drafts WHERE store_id = $1 AND user_id = $2"
_DRAFT: Final = f"{_DRAFTS} AND name = $3"
_PUT_DRAFT: Final = """
INSERT INTO job_store.agent_drafts
    (store_id, name, version, definition, tool_names, create_time, user_id, create_credential_id)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (store_id, user_id, name) DO UPDATE SET version = excluded.version, definition = excluded.definition,
    tool_names = excluded.tool_names, create_time = excluded.create_time,
    create_credential_id = excluded.create_credential_id
"""
_DELETE_DRAFT: Final = "DELETE FROM job_store.agent_drafts WHERE store_id = $1 AND user_id = $2 AND name = $3"


class _Rows(NamedTuple):
    table: str
    key: str
    names: str


_VERSION_ROWS: Final = _Rows("job_store.agent_versions", _KEY, _COLUMNS)
_LIST: Final = run_lists.statement(
    _VERSION_ROWS,
    source=f"""(
        SELECT v.* FROM job_store.agents AS a JOIN job_store.agent_versions AS v USING ({_KEY})
        WHERE a.delete_time IS NULL
    )""",
    where="store_id = $3 AND name > $4",
    order="name",
    size=_SIZE,
)
_VERSIONS: Final = run_lists.statement(
    _VERSION_ROWS, where="store_id = $3 AND name = $4 AND version < $5", order="version DESC", size=_SIZE
)
_LIST_DRAFTS: Final = run_lists.statement(
    _Rows("job_store.agent_drafts", "store_id, user_id, name", _DRAFT_COLUMNS),
    where="store_id = $3 AND user_id = $4 AND name > $5",
    order="name",
    size=_SIZE,
)
_values: Final = attrgetter(*_COLUMNS.split(", "))


class PostgresAgents:
    """Stores agent versions and drafts. Changes within a store are serialised."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(
        self, store_id: StoreId, name: str, delegates_to: tuple[str, ...], save: Save, *, validate_only: bool
    ) -> tuple[AgentVersionRow, bool]:
        """Store the version that `save` returns, if it is new.

        Return the version, and whether it is new.

        With `validate_only`, nothing is stored.

        Raises:
            PawlError: Any error that `save` raises.
        """
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK, store_id)
            now = await connection.fetchval("SELECT clock_timestamp()")
            agents = await _agents(connection, store_id)
            newest = await _version(connection, store_id, name, agents[name].version) if name in agents else None
            kept = save(agents, newest, now)
            if kept is newest:
                return kept, False
            if not validate_only:
                await connection.execute(_ADD, *_values(kept))
                await connection.execute(_PUT, store_id, name, kept.version, delegates_to)
                await connection.execute(_WAKE, store_id, name, bytes([WaitKind.AGENT_QUOTA]))
        return kept, True

    async def get(self, store_id: StoreId, name: str, version: int) -> AgentVersionRow | None:
        """Return a version of an agent; None if it does not exist. Version 0 is a live agent's newest version."""
        if version:
            return await _version(self._database, store_id, name, version)
        row = await self._database.fetchrow(_LIVE, store_id, name)
        return None if row is None else _read(row)

    async def list(self, store_id: StoreId, *, after: str, rows_max: int) -> Page[AgentVersionRow]:
        """Return the newest versions of agents that are not deleted, sorted by name, starting after `after`."""
        return await run_lists.fetch(self._database, _LIST, (store_id, after), _read, rows_max=rows_max)

    async def versions(self, store_id: StoreId, name: str, *, before: int, rows_max: int) -> Page[AgentVersionRow]:
        """Return an agent's versions below `before`, newest first."""
        return await run_lists.fetch(self._database, _VERSIONS, (store_id, name, before), _read, rows_max=rows_max)

    async def delete(self, store_id: StoreId, name: str, user_id: UserId, credential_id: CredentialId) -> bool:
        """Mark an agent as deleted; return False if there is no such agent."""
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK, store_id)
            is_deleted = bool(affected(await connection.execute(_DELETE, store_id, name, user_id, credential_id)))
            await connection.execute(_WAKE, store_id, name, bytes([WaitKind.AGENT_QUOTA]))
        return is_deleted

    async def put_draft(
        self, store_id: StoreId, user_id: UserId, save: SaveDraft, *, validate_only: bool
    ) -> tuple[AgentVersionRow, bool]:
        """Store the draft that `save` returns, if it is new. See `put`."""
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK, store_id)
            now = await connection.fetchval("SELECT clock_timestamp()")
            drafts = {row["name"]: _read(row) for row in await connection.fetch(_DRAFTS, store_id, user_id)}
            kept = save(await _agents(connection, store_id), drafts, now)
            if kept is drafts.get(kept.name):
                return kept, False
            if not validate_only:
                await connection.execute(_PUT_DRAFT, *_values(kept))
        return kept, True

    async def get_draft(self, store_id: StoreId, user_id: UserId, name: str) -> AgentVersionRow | None:
        row = await self._database.fetchrow(_DRAFT, store_id, user_id, name)
        return None if row is None else _read(row)

    async def list_drafts(
        self, store_id: StoreId, user_id: UserId, *, after: str, rows_max: int
    ) -> Page[AgentVersionRow]:
        return await run_lists.fetch(self._database, _LIST_DRAFTS, (store_id, user_id, after), _read, rows_max=rows_max)

    async def delete_draft(self, store_id: StoreId, user_id: UserId, name: str) -> bool:
        """Remove a draft; return False if there is no such draft."""
        return bool(affected(await self._database.execute(_DELETE_DRAFT, store_id, user_id, name)))


async def _version(
    connection: Connection | Database, store_id: StoreId, name: str, version: int
) -> AgentVersionRow | None:
    row = await connection.fetchrow(_VERSION, store_id, name, version)
    return None if row is None else _read(row)


async def _agents(connection: Connection, store_id: StoreId) -> dict[str, AgentRow]:
    rows = await connection.fetch(_AGENTS, store_id)
    return {row["name"]: AgentRow(**dict(row) | {"delegates_to": tuple(row["delegates_to"])}) for row in rows}


def _read(row: Record) -> AgentVersionRow:
    fields: dict[str, Any] = dict(row)
    fields.pop("found", None)
    return AgentVersionRow(**fields | {"tool_names": tuple(fields["tool_names"])})
