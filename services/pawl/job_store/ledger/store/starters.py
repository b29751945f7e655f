"""Schedules and triggers, which start runs of their users, in PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any, Final, Generic

from asyncpg import Record

from pawl.chassis.db.database import Database, DatabaseAdapter, affected
from pawl.chassis.db.rows import read_each
from pawl.chassis.ids import RunId, StoreId, UserId
from pawl.errors import Unreadable
from pawl.job_store.ledger.store.columns import Columns, joined
from pawl.job_store.schedules.rules import StarterT
from pawl.values import RunState

# The statements are made from constants of this package only.
# ruff: noqa: S608

_OF_USER: Final = "store_id = $1 AND user_id = $2"
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext($3), hashtext($1 || ' ' || $2))"
_STATES: Final = """
SELECT now() AS now, k.run_id, (SELECT state FROM job_store.runs WHERE store_id = $1 AND run_id = k.run_id) AS state
FROM unnest($2::text[]) AS k (run_id)
"""


class PostgresStarters(DatabaseAdapter, Generic[StarterT]):
    """The rows of one table by their users and names."""

    def __init__(
        self,
        database: Database,
        columns: Columns[StarterT],
        read: Callable[[Record | Mapping[str, Any]], StarterT],
    ) -> None:
        super().__init__(database)
        table = columns.table
        self._columns = columns
        self._read = read
        self._get = f"SELECT {columns.names} FROM {table} WHERE {_OF_USER} AND name = $3"
        self._now_and_count = (
            f"SELECT clock_timestamp() AS now, (SELECT count(*) FROM {table} WHERE {_OF_USER}) AS count"
        )
        self._list = f"SELECT {columns.names} FROM {table} WHERE {_OF_USER} ORDER BY name"
        self._delete = f"DELETE FROM {table} WHERE {_OF_USER} AND name = $3"

    async def change(
        self,
        store_id: StoreId,
        user_id: UserId,
        name: str,
        change: Callable[[StarterT | None, int, datetime], StarterT],
    ) -> StarterT:
        """Keep what `change` returns. Changes of a user's rows come one after the other.

        Raises:
            PawlError: what `change` raises.
            Unreadable: the row cannot be read.
        """
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK, store_id, user_id, self._columns.table)
            record = await connection.fetchrow(f"{self._get} FOR UPDATE", store_id, user_id, name)
            row = None if record is None else self._readable(record)
            (counted,) = await connection.fetch(self._now_and_count, store_id, user_id)
            changed = change(row, counted["count"], counted["now"])
            if row is None or changed is not row:
                columns = self._columns
                write = columns.insert([changed]) if row is None else columns.update([(row, changed)])
                statement, arguments = joined([write])
                await connection.execute(statement, *arguments)
        return changed

    async def get(
        self, store_id: StoreId, user_id: UserId, name: str
    ) -> tuple[StarterT, Mapping[RunId, RunState], datetime] | None:
        """Return a row, the states of the runs of its fires that still exist, and the time."""
        record = await self._database.fetchrow(self._get, store_id, user_id, name)
        if record is None:
            return None
        row = self._readable(record)
        # One more, for the time.
        found = await self._database.fetch(_STATES, store_id, [fire.run_id for fire in row.fires if fire.run_id] + [""])
        states = {each["run_id"]: RunState(each["state"]) for each in found if each["state"] is not None}
        return row, states, found[0]["now"]

    def _readable(self, record: Record | Mapping[str, Any]) -> StarterT:
        """Return the row of a record.

        Raises:
            Unreadable: the row cannot be read.
        """
        found = read_each(self._columns.table, [record], self._read, itemgetter("name"))
        if not found:
            raise Unreadable(f"{record['name']!r} is damaged and cannot be read: delete it")
        return found[0]

    async def list(self, store_id: StoreId, user_id: UserId) -> Sequence[StarterT]:
        """Return the rows of a user, by name."""
        records = await self._database.fetch(self._list, store_id, user_id)
        return read_each(self._columns.table, records, self._read, itemgetter("name"))

    async def delete(self, store_id: StoreId, user_id: UserId, name: str) -> bool:
        """Remove a row; return whether it existed."""
        return bool(affected(await self._database.execute(self._delete, store_id, user_id, name)))
