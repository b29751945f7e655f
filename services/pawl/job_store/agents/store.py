"""Stores agents and their drafts in PostgreSQL."""

from __future__ import annotations

from typing import Final

from pawl.chassis.ids import StoreId, UserId
from pawl.job_store.agents.rules import AGENT, SaveDraft
from pawl.job_store.ledger.reading import Page
from pawl.job_store.ledger.store import run_lists
from pawl.job_store.versions.rules import VersionRow
from pawl.job_store.versions.store import LOCK, SIZE, PostgresVersions, Rows, read, values
from pawl.server.db.database import Connection, Database, affected
from pawl.values import RunState, WaitKind

# The statements are built only from constants in this module.
# ruff: noqa: S608

# Wake the runs waiting for the agent's daily quota, which may have been changed or removed.
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
_DRAFT_COLUMNS: Final = "store_id, name, version, content, create_time, user_id AS create_user_id, create_credential_id"
_DRAFTS: Final = f"SELECT {_DRAFT_COLUMNS} FROM job_store.agent_drafts WHERE store_id = $1 AND user_id = $2"
_DRAFT: Final = f"{_DRAFTS} AND name = $3"
_PUT_DRAFT: Final = """
INSERT INTO job_store.agent_drafts (store_id, name, version, content, create_time, user_id, create_credential_id)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (store_id, user_id, name) DO UPDATE SET version = excluded.version, content = excluded.content,
    create_time = excluded.create_time, create_credential_id = excluded.create_credential_id
"""
_DELETE_DRAFT: Final = "DELETE FROM job_store.agent_drafts WHERE store_id = $1 AND user_id = $2 AND name = $3"
_LIST_DRAFTS: Final = run_lists.statement(
    Rows("job_store.agent_drafts", "store_id, user_id, name", _DRAFT_COLUMNS),
    where="store_id = $3 AND user_id = $4 AND name > $5",
    order="name",
    size=SIZE,
)


class PostgresAgents(PostgresVersions):
    """Stores agent versions and drafts."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, AGENT)

    async def changed(self, connection: Connection, store_id: StoreId, name: str) -> None:
        await connection.execute(_WAKE, store_id, name, bytes([WaitKind.AGENT_QUOTA]))

    async def put_draft(
        self, store_id: StoreId, user_id: UserId, save: SaveDraft, *, validate_only: bool
    ) -> tuple[VersionRow, bool]:
        """If the draft that `save` returns is new, store it. See `put`."""
        async with self._database.transaction() as connection:
            await connection.execute(LOCK, store_id)
            now = await connection.fetchval("SELECT clock_timestamp()")
            drafts = {row["name"]: read(row) for row in await connection.fetch(_DRAFTS, store_id, user_id)}
            stored = save(await self.known(connection, store_id), drafts, now)
            if stored is drafts.get(stored.name):
                return stored, False
            if not validate_only:
                await connection.execute(_PUT_DRAFT, *values(stored))
        return stored, True

    async def get_draft(self, store_id: StoreId, user_id: UserId, name: str) -> VersionRow | None:
        row = await self._database.fetchrow(_DRAFT, store_id, user_id, name)
        return None if row is None else read(row)

    async def list_drafts(self, store_id: StoreId, user_id: UserId, *, after: str, rows_max: int) -> Page[VersionRow]:
        return await run_lists.fetch(self._database, _LIST_DRAFTS, (store_id, user_id, after), read, rows_max=rows_max)

    async def delete_draft(self, store_id: StoreId, user_id: UserId, name: str) -> bool:
        """Delete a draft. Return False if there is no such draft."""
        return bool(affected(await self._database.execute(_DELETE_DRAFT, store_id, user_id, name)))
