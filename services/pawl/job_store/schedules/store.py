"""Stores schedules in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from operator import itemgetter
from typing import Final

from asyncpg import Record

from pawl.job_store.ledger.store import tables
from pawl.job_store.ledger.store.starters import PostgresStarters
from pawl.job_store.schedules.rules import CLAIM_SECONDS, POLL_SECONDS, ClaimedSchedule, ScheduleRow
from pawl.server.db.database import Database, read_each

# The statements are built only from constants in this package.
# ruff: noqa: S608

# A schedule whose firing is still waiting can be claimed again after POLL_SECONDS, others after CLAIM_SECONDS.
_CLAIM: Final = f"""
WITH due AS MATERIALIZED (
    SELECT s.store_id, s.schedule_id, coalesce((
        SELECT r.state FROM job_store.runs AS r WHERE r.store_id = s.store_id AND r.run_id = s.last_run_id
    ) < 10, false) AS is_busy
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


class PostgresSchedules(PostgresStarters[ScheduleRow]):
    def __init__(self, database: Database) -> None:
        super().__init__(database, tables.SCHEDULES, tables.SCHEDULES.read)

    async def claim(self, *, schedules_max: int) -> Sequence[ClaimedSchedule]:
        """Claim schedules that are due, or whose waiting firing may start. The longest overdue come first."""
        lease, poll = timedelta(seconds=CLAIM_SECONDS), timedelta(seconds=POLL_SECONDS)
        records = await self._database.fetch(_CLAIM, schedules_max, lease, poll)
        return read_each("schedule", records, _claimed, itemgetter("schedule_id"))

    async def wait_seconds(self) -> float | None:
        """Return the number of seconds until the next schedule can be claimed, or None if there is no such schedule."""
        seconds: float | None = await self._database.fetchval(_WAIT)
        return seconds


def _claimed(record: Record) -> ClaimedSchedule:
    fields = dict(record)
    now, is_busy = fields.pop("now"), fields.pop("is_busy")
    return ClaimedSchedule(row=tables.SCHEDULES.read(fields), now=now, is_busy=is_busy)
