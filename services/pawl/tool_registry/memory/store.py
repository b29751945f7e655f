"""Stores memories in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pawl.errors import TooLarge
from pawl.server.db.database import DatabaseAdapter, affected
from pawl.tool_registry.memory.rules import MEMORIES_MAX, USER_MEMORIES_MAX, Memory, MemoryOwner

_COLUMNS: Final = "memory_id, agent_name, content AS text, extract(epoch FROM created_at)::float8 AS create_time"
_OWNED: Final = "store_id = $1 AND user_id = $2 AND ($3 = '' OR agent_name = $3)"
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtextextended('tool_registry.memories ' || $1 || ' ' || $2, 0))"
_KNOWN: Final = f"""
SELECT {_COLUMNS} FROM tool_registry.memories WHERE {_OWNED} AND (memory_id = $4 OR content = $5)
ORDER BY memory_id = $4 DESC LIMIT 1
"""  # noqa: S608  # constants only
_COUNTS: Final = """
SELECT count(*) AS of_user, count(*) FILTER (WHERE agent_name = $3) AS of_agent
FROM tool_registry.memories WHERE store_id = $1 AND user_id = $2
"""
_ADD: Final = f"""
INSERT INTO tool_registry.memories (store_id, user_id, agent_name, memory_id, content)
VALUES ($1, $2, $3, $4, $5) RETURNING {_COLUMNS}
"""  # noqa: S608  # constants only
_NEWEST: Final = f"""
SELECT {_COLUMNS} FROM tool_registry.memories WHERE {_OWNED} ORDER BY created_at DESC, memory_id LIMIT $4
"""  # noqa: S608  # constants only
# Owners have few memories, so a scan is fast enough. A query without words matches nothing.
_SEARCH: Final = f"""
WITH asked AS MATERIALIZED (SELECT websearch_to_tsquery('simple', $5) AS query)
SELECT {_COLUMNS} FROM tool_registry.memories, asked
WHERE {_OWNED} AND numnode(query) > 0 AND to_tsvector('simple', content) @@ query
ORDER BY ts_rank_cd(to_tsvector('simple', content), query, 1) DESC, created_at DESC, memory_id LIMIT $4
"""  # noqa: S608  # constants only
_AFTER: Final = f"""
SELECT * FROM (SELECT {_COLUMNS} FROM tool_registry.memories WHERE {_OWNED}) AS m
WHERE (agent_name, create_time, memory_id) > ($4, $5, $6) ORDER BY agent_name, create_time, memory_id LIMIT $7
"""  # noqa: S608  # constants only
_DELETE: Final = f"DELETE FROM tool_registry.memories WHERE {_OWNED} AND ($4 = '' OR memory_id = $4)"  # noqa: S608


class PostgresMemoryRepository(DatabaseAdapter):
    async def add(self, owner: MemoryOwner, memory_id: str, text: str) -> Memory:
        """Store a memory and return it. If there is one with the same text, return that one.

        Atomic, and idempotent by id.

        Raises:
            TooLarge: The limit for the agent or for the user is reached.
        """
        key = (owner.store_id, owner.user_id, owner.agent_name)
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK, owner.store_id, owner.user_id)
            known = await connection.fetchrow(_KNOWN, *key, memory_id, text)
            if known is not None:
                return Memory(**known)
            (counts,) = await connection.fetch(_COUNTS, *key)
            if counts["of_agent"] >= MEMORIES_MAX:
                raise TooLarge(f"an agent can have at most {MEMORIES_MAX} memories about a user")
            if counts["of_user"] >= USER_MEMORIES_MAX:
                raise TooLarge(f"there can be at most {USER_MEMORIES_MAX} memories about a user")
            (added,) = await connection.fetch(_ADD, *key, memory_id, text)
        return Memory(**added)

    async def search(self, owner: MemoryOwner, query: str, most: int) -> Sequence[Memory]:
        """Return matching memories, best matches first. For an empty query, return the newest memories.

        The query uses web search syntax: words, "quoted phrases", `or` between alternatives, and `-` before excluded
        words.
        """
        key = (owner.store_id, owner.user_id, owner.agent_name)
        rows = await (
            self._database.fetch(_SEARCH, *key, most, query) if query else self._database.fetch(_NEWEST, *key, most)
        )
        return [Memory(**row) for row in rows]

    async def after(self, owner: MemoryOwner, place: tuple[str, float, str], most: int) -> Sequence[Memory]:
        """Return memories after a position, ordered by agent, time and id."""
        rows = await self._database.fetch(_AFTER, owner.store_id, owner.user_id, owner.agent_name, *place, most)
        return [Memory(**row) for row in rows]

    async def delete(self, owner: MemoryOwner, memory_id: str = "") -> int:
        """Delete one memory, or all of the owner's memories if `memory_id` is empty. Return how many were deleted."""
        return affected(
            await self._database.execute(_DELETE, owner.store_id, owner.user_id, owner.agent_name, memory_id)
        )
