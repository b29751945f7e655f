"""Sources in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import asyncpg

from pawl.chassis.db.database import DatabaseAdapter
from pawl.chassis.ids import StoreId
from pawl.errors import InvalidField
from pawl.tool_registry.sources.rules import SOURCES_MAX, Source, SourceRecord, SourceState

_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('tool_registry.tool_sources'), hashtext($1))"
_COUNT_OTHERS: Final = "SELECT count(*) FROM tool_registry.tool_sources WHERE store_id = $1 AND name <> $2"
_PUT: Final = """
INSERT INTO tool_registry.tool_sources (store_id, name, kind, config, runs_program, state, problem, created_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, to_timestamp($8))
ON CONFLICT (store_id, name) DO UPDATE SET
    kind = excluded.kind, config = excluded.config, runs_program = excluded.runs_program,
    state = excluded.state, problem = excluded.problem, created_at = excluded.created_at
"""
_SET_STATE: Final = """
UPDATE tool_registry.tool_sources SET state = $3, problem = $4
WHERE store_id = $1 AND name = $2 AND (state, problem) IS DISTINCT FROM ($3, $4)
"""
_GET: Final = "SELECT * FROM tool_registry.tool_sources WHERE store_id = $1 AND name = $2"
_LIST: Final = 'SELECT * FROM tool_registry.tool_sources WHERE store_id = $1 ORDER BY name COLLATE "C"'
_REMOVE: Final = "DELETE FROM tool_registry.tool_sources WHERE store_id = $1 AND name = $2 RETURNING name"


class PostgresSourceRepository(DatabaseAdapter):
    """The sources of stores, durable. Their tools are in the ToolRepository."""

    async def put(self, record: SourceRecord) -> None:
        """Write a source, instead of one of its name.

        Raises:
            InvalidField: the store has SOURCES_MAX sources.
        """
        source = record.source
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK, source.store_id)
            if await connection.fetchval(_COUNT_OTHERS, source.store_id, source.name) >= SOURCES_MAX:
                raise InvalidField(f"a store has at most {SOURCES_MAX} sources", field="config.name")
            await connection.execute(
                _PUT,
                source.store_id,
                source.name,
                source.kind,
                source.config,
                record.runs_program,
                record.state.value,
                record.problem,
                record.create_time,
            )

    async def set_state(self, store_id: StoreId, name: str, state: SourceState, problem: str) -> None:
        """Write the state of a source, if it still exists."""
        await self._database.execute(_SET_STATE, store_id, name, state.value, problem)

    async def get(self, store_id: StoreId, name: str) -> SourceRecord | None:
        """Return a source of a store."""
        row = await self._database.fetchrow(_GET, store_id, name)
        return None if row is None else _record(row)

    async def source(self, store_id: StoreId, name: str) -> Source | None:
        """Return how to reach a source of a store, as it is now."""
        record = await self.get(store_id, name)
        return None if record is None else record.source

    async def list(self, store_id: StoreId) -> Sequence[SourceRecord]:
        """Return the sources of a store, by name."""
        rows = await self._database.fetch(_LIST, store_id)
        return [_record(row) for row in rows]

    async def remove(self, store_id: StoreId, name: str) -> bool:
        """Delete a source; returns whether it existed."""
        return await self._database.fetchval(_REMOVE, store_id, name) is not None


def _record(row: asyncpg.Record) -> SourceRecord:
    return SourceRecord(
        source=Source(store_id=row["store_id"], name=row["name"], kind=row["kind"], config=row["config"]),
        state=SourceState(row["state"]),
        problem=row["problem"],
        runs_program=row["runs_program"],
        create_time=row["created_at"].timestamp(),
    )
