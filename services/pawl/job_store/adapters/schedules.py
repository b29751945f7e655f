"""Schedules in PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from asyncpg import Record

from pawl.chassis.database import DatabaseAdapter, affected
from pawl.chassis.ids import RunId, StoreId, UserId
from pawl.job_store.adapters import tables
from pawl.job_store.adapters.columns import joined
from pawl.job_store.app.schedules import Change, ClaimedSchedule
from pawl.job_store.domain.schedules import CLAIM_SECONDS, LOOK_SECONDS, ScheduleRow
from pawl.job_store.domain.states import RunState

# The statements are made from constants of this package only.
# ruff: noqa: S608

_OF_USER: Final = "store_id = $1 AND user_id = $2"
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('job_store.schedules'), hashtext($1 || ' ' || $2))"
_GET: Final = f"SELECT {tables.SCHEDULES.names} FROM job_store.schedules WHERE {_OF_USER} AND name = $3"
_NOW_AND_COUNT: Final = f"""
SELECT clock_timestamp() AS now, (SELECT count(*) FROM job_store.schedules WHERE {_OF_USER}) AS count
"""
_LIST: Final = f"SELECT {tables.SCHEDULES.names} FROM job_store.schedules WHERE {_OF_USER} ORDER BY name"
_DELETE: Final = f"DELETE FROM job_store.schedules WHERE {_OF_USER} AND name = $3"
_STATES: Final = """
SELECT now() AS now, k.run_id, r.state FROM unnest($2::text[]) AS k (run_id)
LEFT JOIN job_store.runs AS r ON r.store_id = $1 AND r.run_id = k.run_id
"""
# A fire that still has to wait is looked after again soon; others are kept from other callers as long as a claim lasts.
_CLAIM: Final = f"""
WITH due AS MATERIALIZED (
    SELECT s.store_id, s.schedule_id, EXISTS (
        SELECT FROM job_store.runs AS r WHERE r.store_id = s.store_id AND r.run_id = s.last_run_id AND r.state < 10
    ) AS is_busy
    FROM job_store.schedules AS s WHERE s.claim_at <= now()
    ORDER BY s.claim_at LIMIT $1 FOR UPDATE OF s SKIP LOCKED
), claimed AS (
    UPDATE job_store.schedules AS s SET claim_at = CASE
        WHEN due.is_busy AND coalesce(s.due_time > now(), true) THEN least(s.due_time, now() + $3) ELSE now() + $2
    END
    FROM due WHERE s.store_id = due.store_id AND s.schedule_id = due.schedule_id
    RETURNING s.*, due.is_busy, NOT (due.is_busy AND coalesce(s.due_time > now(), true)) AS is_due
)
SELECT {tables.SCHEDULES.names}, is_busy, now() AS now FROM claimed WHERE is_due ORDER BY coalesce(due_time, now())
"""
_WAIT: Final = "SELECT extract(epoch FROM min(claim_at) - clock_timestamp())::float8 FROM job_store.schedules"


class PostgresSchedules(DatabaseAdapter):
    """See `schedules.ScheduleRepository`."""

    async def change(self, store_id: StoreId, user_id: UserId, name: str, change: Change) -> ScheduleRow:
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK, store_id, user_id)
            record = await connection.fetchrow(f"{_GET} FOR UPDATE", store_id, user_id, name)
            row = None if record is None else tables.schedule(record)
            (counted,) = await connection.fetch(_NOW_AND_COUNT, store_id, user_id)
            changed = change(row, counted["count"], counted["now"])
            if row is None or changed is not row:
                columns = tables.SCHEDULES
                write = columns.insert([changed]) if row is None else columns.update([(row, changed)])
                statement, arguments = joined([write])
                await connection.execute(statement, *arguments)
        return changed

    async def get(
        self, store_id: StoreId, user_id: UserId, name: str
    ) -> tuple[ScheduleRow, Mapping[RunId, RunState], datetime] | None:
        record = await self._database.fetchrow(_GET, store_id, user_id, name)
        if record is None:
            return None
        row = tables.schedule(record)
        # One more, for the time.
        found = await self._database.fetch(_STATES, store_id, [fire.run_id for fire in row.fires if fire.run_id] + [""])
        states = {each["run_id"]: RunState(each["state"]) for each in found if each["state"] is not None}
        return row, states, found[0]["now"]

    async def list(self, store_id: StoreId, user_id: UserId) -> Sequence[ScheduleRow]:
        return tuple(map(tables.schedule, await self._database.fetch(_LIST, store_id, user_id)))

    async def delete(self, store_id: StoreId, user_id: UserId, name: str) -> bool:
        return bool(affected(await self._database.execute(_DELETE, store_id, user_id, name)))

    async def claim(self, *, schedules_max: int) -> Sequence[ClaimedSchedule]:
        lease, look = timedelta(seconds=CLAIM_SECONDS), timedelta(seconds=LOOK_SECONDS)
        return tuple(map(_claimed, await self._database.fetch(_CLAIM, schedules_max, lease, look)))

    async def wait_seconds(self) -> float | None:
        seconds: float | None = await self._database.fetchval(_WAIT)
        return seconds


def _claimed(record: Record) -> ClaimedSchedule:
    fields = dict(record)
    now, is_busy = fields.pop("now"), fields.pop("is_busy")
    return ClaimedSchedule(row=tables.schedule(fields), now=now, is_busy=is_busy)
