"""Uses of series grants, stored in PostgreSQL. Each call is one row with a unique use number."""

from __future__ import annotations

from typing import Final

from pawl.chassis.ids import CallId, StoreId
from pawl.server.db.database import DatabaseAdapter

# Looked up by call, because a grant can have a million uses and each call is checked twice.
_IS_COUNTED: Final = """
SELECT EXISTS (
    SELECT FROM tool_registry.grant_uses WHERE store_id = $1 AND call_id = $3 AND digest IS NOT DISTINCT FROM $2
)
"""
_USE: Final = """
INSERT INTO tool_registry.grant_uses (store_id, digest, call_id, number)
SELECT $1, $2, $3, coalesce(max(number), 0) + 1 FROM tool_registry.grant_uses WHERE store_id = $1 AND digest = $2
HAVING coalesce(max(number), 0) < $4
ON CONFLICT DO NOTHING RETURNING true
"""
_LEFT: Final = """
SELECT coalesce(max(number), 0) < $3 FROM tool_registry.grant_uses WHERE store_id = $1 AND digest = $2
"""
# Iterations are at most a day apart, but the series may have been paused.
_FORGET: Final = """
DELETE FROM tool_registry.grant_uses AS u WHERE u.used_at < now() - interval '30 days' AND NOT EXISTS (
    SELECT FROM tool_registry.grant_uses AS later WHERE later.store_id = u.store_id AND later.digest = u.digest
    AND later.used_at >= now() - interval '30 days')
"""


class PostgresGrantUses(DatabaseAdapter):
    """Stores the calls that started under series grants. Durable and shared by all replicas."""

    async def use(self, store_id: StoreId, digest: str, call_id: CallId, *, uses_max: int) -> bool:
        """Count a call once if the grant has uses left. Return whether the call has been counted. Atomic."""
        async with self._database.acquire() as connection:
            while not await connection.fetchval(_USE, store_id, digest, call_id, uses_max):
                if await connection.fetchval(_IS_COUNTED, store_id, digest, call_id):
                    return True
                if not await connection.fetchval(_LEFT, store_id, digest, uses_max):
                    return False
                # Another call took the same number concurrently, so try again.
        return True

    async def forget(self) -> None:
        """Delete the uses of grants that were last used more than 30 days ago."""
        await self._database.execute(_FORGET)
