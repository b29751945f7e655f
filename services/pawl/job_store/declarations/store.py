"""Stores declarations and the leases of sets in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import asyncpg

from pawl.agent.v1.declaration_pb2 import Declaration
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import Conflict, TooLarge
from pawl.job_store.ledger.rpc.messages import timestamp
from pawl.server.db.database import DatabaseAdapter

DECLARATIONS_MAX: Final = 5000

# The statements are built only from constants in this module.
# ruff: noqa: S608

_COLUMNS: Final = 'kind, name, set_name AS "set", version, update_user_id, update_time'
_KEY: Final = "store_id = $1 AND user_id = $2 AND kind = $3 AND name = $4"
_LIST: Final = f"""
SELECT {_COLUMNS} FROM job_store.declarations WHERE store_id = $1 AND user_id IN ('', $2) ORDER BY kind, name
"""
_GET: Final = f"SELECT {_COLUMNS} FROM job_store.declarations WHERE {_KEY}"
_COUNT: Final = "SELECT count(*) FROM job_store.declarations WHERE store_id = $1 AND user_id = $2"
_ADD: Final = f"""
INSERT INTO job_store.declarations (store_id, user_id, kind, name, set_name, version, update_user_id, update_time)
VALUES ($1, $2, $3, $4, $5, 1, $6, now()) ON CONFLICT DO NOTHING RETURNING {_COLUMNS}
"""
_CHANGE: Final = f"""
UPDATE job_store.declarations SET set_name = $5, version = version + 1, update_user_id = $6, update_time = now()
WHERE {_KEY} AND version = $7 RETURNING {_COLUMNS}
"""
_DELETE: Final = f"DELETE FROM job_store.declarations WHERE {_KEY} AND version = $5 RETURNING true"
_LEASE: Final = """
WITH expired AS (
  DELETE FROM job_store.set_leases WHERE store_id = $1 AND user_id = $2 AND set_name <> $3 AND expire_time <= now()
)
INSERT INTO job_store.set_leases AS l (store_id, user_id, set_name, holder_id, expire_time)
VALUES ($1, $2, $3, $4, now() + make_interval(secs => $5))
ON CONFLICT (store_id, user_id, set_name) DO UPDATE
SET holder_id = excluded.holder_id, expire_time = excluded.expire_time
WHERE l.holder_id = excluded.holder_id OR l.expire_time <= now() RETURNING true
"""


class PostgresDeclarations(DatabaseAdapter):
    async def list(self, store_id: StoreId, user_id: UserId) -> Sequence[Declaration]:
        """Return the store's declarations and the user's own, sorted by kind and name."""
        return [_message(row) for row in await self._database.fetch(_LIST, store_id, user_id)]

    async def put(self, store_id: StoreId, owner_id: str, requested: Declaration, by: UserId) -> Declaration:
        """Create a declaration if `version` is 0. Otherwise, change it.

        `owner_id` is empty if the declaration belongs to the store.

        Raises:
            Conflict: The version is not the current one.
            TooLarge: The owner has too many declarations.
        """
        key = (store_id, owner_id, requested.kind, requested.name)
        if requested.version:
            row = await self._database.fetchrow(_CHANGE, *key, requested.set, by, requested.version)
        elif await self._database.fetchval(_COUNT, store_id, owner_id) >= DECLARATIONS_MAX:
            raise TooLarge(f"{owner_id or 'the store'} already has {DECLARATIONS_MAX} declarations, the maximum")
        else:
            row = await self._database.fetchrow(_ADD, *key, requested.set, by)
        if row is None:
            raise await self._conflict(store_id, owner_id, requested)
        return _message(row)

    async def delete(self, store_id: StoreId, owner_id: str, requested: Declaration) -> None:
        """Delete a declaration.

        Raises:
            Conflict: The version is not the current one.
        """
        if not await self._database.fetchval(
            _DELETE, store_id, owner_id, requested.kind, requested.name, requested.version
        ):
            raise await self._conflict(store_id, owner_id, requested)

    async def lease(self, store_id: StoreId, user_id: UserId, set_name: str, holder_id: str, seconds: int) -> bool:
        """Lease a user's set for the next `seconds`. Return False if another holder has the lease."""
        return bool(await self._database.fetchval(_LEASE, store_id, user_id, set_name, holder_id, float(seconds)))

    async def _conflict(self, store_id: StoreId, owner_id: str, requested: Declaration) -> Conflict:
        found = await self._database.fetchrow(_GET, store_id, owner_id, requested.kind, requested.name)
        state = "has no declaration" if found is None else f"was changed by {found['update_user_id']}"
        return Conflict(
            f"the {requested.kind} {requested.name!r} {state}, "
            f"so version {requested.version} is outdated: read it again",
            kind=requested.kind,
            name=requested.name,
        )


def _message(row: asyncpg.Record) -> Declaration:
    return Declaration(**dict(row) | {"update_time": timestamp(row["update_time"])})
