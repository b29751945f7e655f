"""The secrets of the audit's digests in PostgreSQL: made with the first entry of a conversation, destroyed with it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from pawl.chassis.db.database import Database
from pawl.tool_registry.audit.rules import AuditDraft, sealed

_Key: TypeAlias = tuple[str, str]

_FIND: Final = """
SELECT store_id, key_id, secret FROM tool_registry.audit_keys
JOIN unnest($1::text[], $2::text[]) AS k (store_id, key_id) USING (store_id, key_id)
"""
# The entry that is made with it is synced after it, and it with that.
_NO_HURRY: Final = "SET LOCAL synchronous_commit = off"
_MAKE: Final = """
INSERT INTO tool_registry.audit_keys (store_id, key_id, secret)
SELECT * FROM unnest($1::text[], $2::text[], $3::bytea[]) ON CONFLICT DO NOTHING
"""
_BYTES: Final = 32
_KEPT_MAX: Final = 10_000
# So long a process may remember one that was destroyed.
_FRESH_SECONDS: Final = 60.0


class AuditSecrets:
    """Makes digests with the secrets of their conversations, which it remembers for a minute."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._kept: dict[_Key, tuple[float, bytes]] = {}

    async def seal(self, drafts: Sequence[AuditDraft]) -> Sequence[AuditDraft]:
        """Return the entries with digests that say nothing without the secrets. Those of what was erased have none."""
        wanted = {(draft.store_id, draft.key_id): None for draft in drafts}
        found = await self._of(wanted)
        return [sealed(draft, found[draft.store_id, draft.key_id]) for draft in drafts]

    async def _of(self, wanted: Iterable[_Key]) -> dict[_Key, bytes]:
        now = time.monotonic()
        found = {key: kept[1] for key in wanted if (kept := self._kept.get(key)) and now - kept[0] < _FRESH_SECONDS}
        if missing := [key for key in wanted if key not in found]:
            read = await self._read(missing)
            if len(self._kept) + len(read) > _KEPT_MAX:
                self._kept.clear()
            self._kept |= {key: (now, secret) for key, secret in read.items() if secret is not None}
            # What was erased gets a digest of its own each time.
            found |= {key: read[key] or secrets.token_bytes(_BYTES) for key in missing}
        return found

    async def _read(self, keys: Sequence[_Key]) -> dict[_Key, bytes | None]:
        """Return the secrets, None for those that were destroyed. What has none yet gets one."""
        columns = [list(column) for column in zip(*keys, strict=True)]
        found = await self._found(columns)
        if new := [key for key in keys if key not in found]:
            stores, key_ids = [list(column) for column in zip(*sorted(new), strict=True)]
            async with self._database.transaction() as connection:
                await connection.execute(_NO_HURRY)
                await connection.execute(_MAKE, stores, key_ids, [secrets.token_bytes(_BYTES) for _ in new])
            found = await self._found(columns)
        return found

    async def _found(self, columns: Sequence[list[str]]) -> dict[_Key, bytes | None]:
        rows = await self._database.fetch(_FIND, *columns)
        return {(row["store_id"], row["key_id"]): row["secret"] for row in rows}
