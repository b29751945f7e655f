"""Stores schedules and triggers, which start runs for their users, in PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from operator import attrgetter, itemgetter
from typing import Any, Final, Generic

import msgspec
from asyncpg import Record

from pawl.chassis.ids import RunId, RunKey, StoreId, UserId
from pawl.errors import Unreadable
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork
from pawl.job_store.ledger.store import tables
from pawl.job_store.ledger.store.columns import Columns, joined
from pawl.job_store.schedules.rules import StarterT
from pawl.job_store.triggers.rules import EventKey, LaneKey, TriggerKey
from pawl.server.db.database import Connection, Database, DatabaseAdapter, affected, read_each
from pawl.values import RunState

# The statements are built only from constants in this package.
# ruff: noqa: S608

_OF_USER: Final = "store_id = $1 AND user_id = $2"
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext($3), hashtext($1 || ' ' || $2))"
_STATES: Final = """
SELECT now() AS now, k.run_id, (SELECT state FROM job_store.runs WHERE store_id = $1 AND run_id = k.run_id) AS state
FROM unnest($2::text[]) AS k (run_id)
"""


class PostgresStarters(DatabaseAdapter, Generic[StarterT]):
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
        *,
        validate_only: bool = False,
    ) -> StarterT:
        """Store the row that `change` returns. With `validate_only`, nothing is stored.

        Changes to a user's rows are serialised.

        Raises:
            PawlError: Any error that `change` raises.
            Unreadable: The stored row is damaged.
        """
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK, store_id, user_id, self._columns.table)
            record = await connection.fetchrow(f"{self._get} FOR UPDATE", store_id, user_id, name)
            row = None if record is None else self._readable(record)
            (counted,) = await connection.fetch(self._now_and_count, store_id, user_id)
            changed = change(row, counted["count"], counted["now"])
            if not validate_only and changed is not row:
                columns = self._columns
                write = columns.insert([changed]) if row is None else columns.update([(row, changed)])
                statement, arguments = joined([write])
                await connection.execute(statement, *arguments)
        return changed

    async def get(
        self, store_id: StoreId, user_id: UserId, name: str
    ) -> tuple[StarterT, Mapping[RunId, RunState], datetime] | None:
        """Return a row, the states of its runs that still exist, and the time, or None if there is no such row."""
        record = await self._database.fetchrow(self._get, store_id, user_id, name)
        if record is None:
            return None
        row = self._readable(record)
        # One more row, for the time.
        found = await self._database.fetch(_STATES, store_id, [fire.run_id for fire in row.fires if fire.run_id] + [""])
        states = {each["run_id"]: RunState(each["state"]) for each in found if each["state"] is not None}
        return row, states, found[0]["now"]

    def _readable(self, record: Record | Mapping[str, Any]) -> StarterT:
        found = read_each(self._columns.table, [record], self._read, itemgetter("name"))
        if not found:
            raise Unreadable(f"{record['name']!r} is damaged and cannot be read: delete it")
        return found[0]

    async def list(self, store_id: StoreId, user_id: UserId) -> Sequence[StarterT]:
        records = await self._database.fetch(self._list, store_id, user_id)
        return read_each(self._columns.table, records, self._read, itemgetter("name"))

    async def delete(self, store_id: StoreId, user_id: UserId, name: str) -> bool:
        return bool(affected(await self._database.execute(self._delete, store_id, user_id, name)))


# The statements are built only from constants in this package.
# ruff: noqa: S608

# Lanes and events belong to triggers and only change under this lock. A removed key counts as ended.
_TRIGGERS: Final = f"""
SELECT {tables.TRIGGERS.names}, starts_with(credential_id, 'key_') AND NOT EXISTS (
    SELECT FROM job_store.api_keys AS a
    WHERE a.key_id = t.credential_id AND a.revoke_time IS NULL AND (a.expire_time IS NULL OR a.expire_time > now())
) AS credential_ended
FROM job_store.triggers AS t
JOIN (SELECT unnest($1::text[]) AS store_id, unnest($2::text[]) AS trigger_id) AS k USING (store_id, trigger_id)
ORDER BY store_id, trigger_id
FOR UPDATE OF t
"""
_LANES: Final = f"""
SELECT {tables.LANES.names} FROM job_store.trigger_lanes
JOIN (SELECT unnest($1::text[]) AS store_id, unnest($2::text[]) AS trigger_id, unnest($3::text[]) AS lane) AS k
USING (store_id, trigger_id, lane)
"""
_EVENTS: Final = f"""
SELECT {tables.TRIGGER_EVENTS.names} FROM job_store.trigger_events
JOIN (SELECT unnest($1::text[]) AS store_id, unnest($2::text[]) AS trigger_id, unnest($3::text[]) AS event_id) AS k
USING (store_id, trigger_id, event_id)
"""


async def load(
    connection: Connection,
    unit: UnitOfWork,
    triggers: Collection[TriggerKey],
    lanes: Collection[LaneKey],
    events: Collection[EventKey],
) -> RowKeys:
    """Load triggers, lanes and events, locked until the end of the transaction.

    Return the keys of the runs that they need.
    """
    records = await connection.fetch(_TRIGGERS, *_columns(TriggerKey, triggers))
    tables.load_into(unit.triggers, tables.TRIGGERS, records)
    records = await connection.fetch(_LANES, *_columns(LaneKey, lanes)) if lanes else []
    waiting = [lane.waiting for lane in tables.load_into(unit.lanes, tables.LANES, records) if lane.event_id]
    records = await connection.fetch(_EVENTS, *_columns(EventKey, dict.fromkeys([*events, *waiting])))
    tables.load_into(unit.trigger_events, tables.TRIGGER_EVENTS, records)
    last = [RunKey(row.store_id, row.last_run_id) for _, row in unit.triggers.items() if row.last_run_id]
    before = tuple(RunKey(row.store_id, row.last_run_id) for _, row in unit.lanes.items() if row.last_run_id)
    runs = tuple(dict.fromkeys((*last, *before)))
    # The lanes' runs may have to be stopped.
    return RowKeys(runs=runs, ends=before, calls_of=before, commands_of=before)


def _columns(kind: type[msgspec.Struct], keys: Collection[Any]) -> list[list[Any]]:
    return [list(map(attrgetter(name), keys)) for name in kind.__struct_fields__]
