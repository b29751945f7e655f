"""Stores sources in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import asyncpg

from pawl.chassis.ids import StoreId
from pawl.errors import InvalidField
from pawl.server.db.database import DatabaseAdapter
from pawl.tool.v1.source_pb2 import SourceConfig
from pawl.tool_registry.sources.rules import SOURCES_MAX
from pawl.tool_registry.sources.source import Source, SourceState

_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('tool_registry.tool_sources'), hashtext($1))"
_COUNT_OTHERS: Final = "SELECT count(*) FROM tool_registry.tool_sources WHERE store_id = $1 AND name <> $2"
_PUT: Final = """
INSERT INTO tool_registry.tool_sources (store_id, name, config, state, problem, created_at)
VALUES ($1, $2, $3, $4, $5, to_timestamp($6))
ON CONFLICT (store_id, name) DO UPDATE SET
    config = excluded.config, state = excluded.state, problem = excluded.problem, created_at = excluded.created_at
"""
_SET_STATE: Final = """
UPDATE tool_registry.tool_sources SET state = $3, problem = $4
WHERE store_id = $1 AND name = $2 AND (state, problem) IS DISTINCT FROM ($3, $4)
"""
_GET: Final = "SELECT * FROM tool_registry.tool_sources WHERE store_id = $1 AND name = $2"
_LIST: Final = 'SELECT * FROM tool_registry.tool_sources WHERE store_id = $1 ORDER BY name COLLATE "C"'
_REMOVE: Final = "DELETE FROM tool_registry.tool_sources WHERE store_id = $1 AND name = $2 RETURNING name"


class PostgresSourceRepository(DatabaseAdapter):
    """The tool sources of all stores. PostgresToolRepository contains their tools."""

    async def put(self, source: Source) -> None:
        """Insert a source, or replace the source with the same name.

        Raises:
            InvalidField: The store already has SOURCES_MAX sources.
        """
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK, source.store_id)
            if await connection.fetchval(_COUNT_OTHERS, source.store_id, source.name) >= SOURCES_MAX:
                raise InvalidField(
                    f"a store may have at most {SOURCES_MAX} sources; remove one first", field="config.name"
                )
            await connection.execute(
                _PUT,
                source.store_id,
                source.name,
                source.config.SerializeToString(deterministic=True),
                source.state.value,
                source.problem,
                source.create_time,
            )

    async def set_state(self, store_id: StoreId, name: str, state: SourceState, problem: str) -> None:
        """Update a source's state, if the source still exists."""
        await self._database.execute(_SET_STATE, store_id, name, state.value, problem)

    async def get(self, store_id: StoreId, name: str) -> Source | None:
        row = await self._database.fetchrow(_GET, store_id, name)
        return None if row is None else _source(row)

    async def list(self, store_id: StoreId) -> Sequence[Source]:
        """Return a store's sources, sorted by name."""
        rows = await self._database.fetch(_LIST, store_id)
        return [_source(row) for row in rows]

    async def remove(self, store_id: StoreId, name: str) -> bool:
        """Delete a source. Return whether it existed."""
        return await self._database.fetchval(_REMOVE, store_id, name) is not None


def _source(row: asyncpg.Record) -> Source:
    return Source(
        store_id=row["store_id"],
        config=SourceConfig.FromString(row["config"]),
        create_time=row["created_at"].timestamp(),
        state=SourceState(row["state"]),
        problem=row["problem"],
    )
