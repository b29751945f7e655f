"""Checkpoints of calls, stored in PostgreSQL."""

from __future__ import annotations

from typing import Final

from pawl.server.db.database import DatabaseAdapter
from pawl.tool_registry.rules.journal import Writer

_NOT_ERASED: Final = "NOT EXISTS (SELECT FROM tool_registry.erased_runs r WHERE r.store_id = $1 AND r.run_id = $3)"
_TAKE: Final = f"""
INSERT INTO tool_registry.checkpoints AS c (store_id, call_id, run_id, token, attempt)
SELECT $1, $2, $3, $4, $5 WHERE {_NOT_ERASED}
ON CONFLICT (store_id, call_id) DO UPDATE SET token = excluded.token, attempt = excluded.attempt
RETURNING content
"""  # constants only
_KEEP: Final = f"""
INSERT INTO tool_registry.checkpoints AS c (store_id, call_id, run_id, token, attempt, content)
SELECT $1, $2, $3, $4, $5, $6 WHERE {_NOT_ERASED}
ON CONFLICT (store_id, call_id) DO UPDATE SET
    token = excluded.token, content = excluded.content, written_at = now()
WHERE c.token = excluded.token OR ($7 AND c.attempt = 1 AND excluded.attempt = 1)
RETURNING true
"""  # constants only
_FORGET: Final = "DELETE FROM tool_registry.checkpoints WHERE written_at < now() - make_interval(secs => $1)"


class PostgresCheckpoints(DatabaseAdapter):
    """Stores each call's newest checkpoint. Durable and shared by all replicas."""

    async def take(self, writer: Writer) -> bytes | None:
        """Return the checkpoint of a restarted call, or None if there is none.

        After this, earlier attempts can no longer write checkpoints. Atomic.
        """
        content: bytes | None = await self._database.fetchval(_TAKE, *_columns(writer), urgent=True)
        return content

    async def keep(self, writer: Writer, content: bytes, *, is_first: bool) -> bool:
        """Replace the checkpoint. Return False if the attempt is not the newest, or if the run was erased.

        `is_first` means that this attempt has not written a checkpoint yet. If this is also the call's first attempt,
        it replaces the checkpoint of another first attempt, since neither has called `take`.
        """
        return bool(await self._database.fetchval(_KEEP, *_columns(writer), content, is_first, urgent=True))

    async def forget(self, older_than_seconds: float) -> None:
        await self._database.execute(_FORGET, older_than_seconds)


def _columns(writer: Writer) -> tuple[str, str, str, str, int]:
    return (writer.key.store_id, writer.key.call_id, writer.run_id, writer.token, writer.attempt)
