"""Stores API keys in PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, Final

import asyncpg

from pawl.chassis.ids import KeyId, StoreId
from pawl.errors import RequestIdReused
from pawl.job_store.keys.rules import Key, KeyEvent, KeyEventKind
from pawl.server.db.database import Database, affected
from pawl.server.identity.key_rows import KeyChanges, KeyGrant

# The statements are built only from constants in this module.
# ruff: noqa: S608

_MADE: Final = (
    "key_id, name, store_id, user_id, roles, decides_for_users, expire_time, create_time, create_user_id,"
    " create_credential_id, maker_user_ids"
)
_COLUMNS: Final = f"{_MADE}, revoke_time, revoke_user_id, revoke_credential_id, last_use_time"
_LIVE: Final = "revoke_time IS NULL AND (expire_time IS NULL OR expire_time > "
# Locks the row until the end of the transaction.
_NEXT_CHANGE: Final = "UPDATE job_store.key_changes SET last_change = last_change + 1 RETURNING last_change"
_LAST_CHANGE: Final = "SELECT last_change FROM job_store.key_changes"
_COUNT: Final = f"""
SELECT count(*) FILTER (WHERE {_LIVE} $2)) AS live, count(*) AS kept FROM job_store.api_keys WHERE store_id = $1
"""
_ADD: Final = f"""
INSERT INTO job_store.api_keys ({_MADE}, digest, change, request_id, request_hash)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)
"""
_BY_REQUEST: Final = f"""
SELECT {_COLUMNS}, request_hash FROM job_store.api_keys
WHERE create_credential_id = $1 AND create_user_id = $2 AND request_id = $3 AND request_id <> ''
"""
# Other stores' keys are not read: the response time would reveal that they exist.
_GET: Final = f"SELECT {_COLUMNS} FROM job_store.api_keys WHERE key_id = $1 AND ($2::text IS NULL OR store_id = $2)"
_REVOKE: Final = """
UPDATE job_store.api_keys SET revoke_time = $2, revoke_user_id = $3, revoke_credential_id = $4, change = $5
WHERE key_id = $1 AND revoke_time IS NULL
"""
_LIST: Final = f"""
SELECT {_COLUMNS} FROM job_store.api_keys
WHERE store_id = $1 AND ($2 = '' OR key_id < $2) AND ($3 OR ({_LIVE} $4)))
ORDER BY key_id DESC LIMIT $5
"""
_CHANGES: Final = """
SELECT change, key_id, digest, store_id, user_id, roles, decides_for_users, extract(epoch FROM expire_time)::float8
    AS expire_time, revoke_time IS NOT NULL AS is_revoked, maker_user_ids
FROM job_store.api_keys WHERE change > $1 ORDER BY change LIMIT $2
"""
# Locks rows in one order and does not wait for concurrent updates, so transactions cannot deadlock.
_NOTE_USES: Final = """
UPDATE job_store.api_keys SET last_use_time = now() WHERE key_id IN (
    SELECT key_id FROM job_store.api_keys
    WHERE key_id = ANY ($1::text[]) AND (last_use_time IS NULL OR last_use_time < now() - interval '60 seconds')
    ORDER BY key_id FOR NO KEY UPDATE SKIP LOCKED
)
"""
_EVENT_COLUMNS: Final = (
    "time, kind, store_id, key_id, key_name, user_id, roles, by_store_id, by_user_id, by_delegate_user_id,"
    " by_credential_id"
)
_ADD_EVENT: Final = f"""
INSERT INTO job_store.key_events ({_EVENT_COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
"""
_SETS: Final = ("roles", "maker_user_ids")
_made: Final = attrgetter(*_MADE.split(", "))
_event_values: Final = attrgetter(*_EVENT_COLUMNS.split(", "))


class PostgresKeyRepository:
    """Stores API keys. Reading `changes` page by page never misses a change."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(
        self,
        key: Key,
        event: KeyEvent,
        digest: bytes,
        check_new: Callable[[Key, int, int], None],
        *,
        request_id: str = "",
        request_hash: bytes = b"",
    ) -> Key:
        """Store the key and its event, or return the key that the same request created.

        An empty request id never matches an earlier request.

        `check_new` receives the key, the number of the store's live keys, and the number of its live and ended keys.

        Raises:
            RequestIdReused: The request id created a different key.
            PawlError: Any error that `check_new` raises.
        """
        async with self._database.transaction() as connection:
            change = await connection.fetchval(_NEXT_CHANGE)
            made = await connection.fetchrow(_BY_REQUEST, key.create_credential_id, key.create_user_id, request_id)
            if made is not None:
                fields = dict(made)
                if fields.pop("request_hash") != request_hash:
                    raise RequestIdReused
                return _key(fields)
            (room,) = await connection.fetch(_COUNT, key.store_id, key.create_time)
            check_new(key, room["live"], room["kept"])
            await connection.execute(_ADD, *_values(_made(key)), digest, change, request_id, request_hash)
            await connection.execute(_ADD_EVENT, *_values(_event_values(event)))
        return key

    async def get(self, key_id: KeyId, store_id: StoreId | None) -> Key | None:
        """Return a key, or None if there is none. If `store_id` is set, search only that store."""
        row = await self._database.fetchrow(_GET, key_id, store_id)
        return None if row is None else _key(dict(row))

    async def revoke(self, key: Key, event: KeyEvent) -> Key:
        """Store the revocation of a key and its event, unless the key was already revoked. Return the stored key."""
        async with self._database.transaction() as connection:
            change = await connection.fetchval(_NEXT_CHANGE)
            by = (key.revoke_time, key.revoke_user_id, key.revoke_credential_id)
            if affected(await connection.execute(_REVOKE, key.key_id, *by, change)):
                await connection.execute(_ADD_EVENT, *_values(_event_values(event)))
            row = await connection.fetchrow(_GET, key.key_id, None)
        return key if row is None else _key(dict(row))

    async def list(
        self, store_id: StoreId, *, include_ended: bool, before: str, keys_max: int, now: datetime
    ) -> Sequence[Key]:
        """Return a store's keys, newest first, starting below `before`."""
        rows = await self._database.fetch(_LIST, store_id, before, include_ended, now, keys_max)
        return [_key(dict(row)) for row in rows]

    async def changes(self, after_change: int, *, keys_max: int) -> KeyChanges:
        async with self._database.acquire() as connection:
            last_change: int = await connection.fetchval(_LAST_CHANGE)
            if last_change <= after_change:
                return KeyChanges(keys=(), last_change=last_change, has_more=False)
            rows = await connection.fetch(_CHANGES, after_change, keys_max + 1)
        has_more = len(rows) > keys_max
        changed = rows[:keys_max]
        # Keys may have changed since `last_change` was read.
        last_change = changed[-1]["change"] if has_more else max(last_change, *(row["change"] for row in rows), 0)
        return KeyChanges(keys=[_grant(row) for row in changed], last_change=last_change, has_more=has_more)

    async def note_uses(self, key_ids: Sequence[str]) -> None:
        """Record that keys have just been used, at most once a minute per key."""
        await self._database.execute(_NOTE_USES, key_ids)

    async def list_events(
        self, store_id: StoreId | None, key_id: str, kind: KeyEventKind | None, *, before: int, events_max: int
    ) -> Sequence[KeyEvent]:
        """Return events with ids below `before`, newest first. Filters that are None or empty match all events."""
        requested = {"key_id": key_id or None, "store_id": store_id, "kind": kind}
        given = {column: value for column, value in requested.items() if value is not None}
        rows = await self._database.fetch(events_of(*given), before, events_max, *given.values())
        return [
            KeyEvent(**dict(row) | {"kind": KeyEventKind(row["kind"]), "roles": frozenset(row["roles"])})
            for row in rows
        ]


def events_of(*columns: str) -> str:
    """Return a statement that lists events filtered by the given columns, the first of which must have an index."""
    order = ", ".join(f"{column} DESC" for column in (*columns[:1], "event_id"))
    # With an equality on the first column, the planner could scan the primary key, which has the same order but reads
    # other rows too.
    wanted = "".join(f" AND {column} BETWEEN ${number} AND ${number}" for number, column in enumerate(columns, 3))
    return f"""
    SELECT event_id, {_EVENT_COLUMNS} FROM job_store.key_events WHERE event_id < $1{wanted}
    ORDER BY {order} LIMIT $2
    """


def _values(fields: Iterable[Any]) -> list[Any]:
    return [sorted(value) if isinstance(value, frozenset) else value for value in fields]


def _key(fields: dict[str, Any]) -> Key:
    return Key(**fields | {name: frozenset(fields[name]) for name in _SETS})


def _grant(row: asyncpg.Record) -> KeyGrant:
    fields = dict(row)
    del fields["change"]
    fields["credential_id"] = fields.pop("key_id")
    return KeyGrant(**fields | {name: frozenset(fields[name]) for name in _SETS})
