"""Stores triggers in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Final

from asyncpg import Record

from pawl.chassis.ids import StoreId
from pawl.job_store.ledger.store import tables
from pawl.job_store.ledger.store.starters import PostgresStarters
from pawl.job_store.schedules.rules import CLAIM_SECONDS, POLL_SECONDS
from pawl.job_store.triggers.rules import LEASED_MAX, MAILBOX_LEASE_TIME, LaneRow, TriggerKey, TriggerRow
from pawl.server.db.database import Database, read_each

# The statements are built only from constants in this package.
# ruff: noqa: S608

_OF_ID: Final = f"""
SELECT {tables.TRIGGERS.names}, clock_timestamp() AS now FROM job_store.triggers
WHERE store_id = $1 AND trigger_id = $2
"""
_ADD_REFUSALS: Final = """
UPDATE job_store.triggers
SET refused_count = refused_count + $3, refused_time = clock_timestamp(), refused_reason = $4
WHERE store_id = $1 AND trigger_id = $2
"""
# An event waiting for the previous run can be claimed again after POLL_SECONDS. Others, and events of paused triggers,
# can be claimed again after CLAIM_SECONDS.
_CLAIM: Final = f"""
WITH due AS MATERIALIZED (
    SELECT l.store_id, l.trigger_id, l.lane, t.pause_time IS NOT NULL AS is_paused, l.awaits_run AND coalesce((
        SELECT r.state FROM job_store.runs AS r WHERE r.store_id = l.store_id AND r.run_id = l.last_run_id
    ) < 10, false) AS is_busy
    FROM job_store.trigger_lanes AS l JOIN job_store.triggers AS t USING (store_id, trigger_id)
    WHERE l.claim_at <= now()
    ORDER BY l.claim_at LIMIT $1 FOR UPDATE OF l SKIP LOCKED
), claimed AS (
    UPDATE job_store.trigger_lanes AS l
    SET claim_at = now() + CASE WHEN due.is_busy AND NOT due.is_paused THEN $3::interval ELSE $2::interval END
    FROM due WHERE l.store_id = due.store_id AND l.trigger_id = due.trigger_id AND l.lane = due.lane
    RETURNING l.*, due.is_paused OR due.is_busy AS has_to_wait
)
SELECT {tables.LANES.names} FROM claimed WHERE NOT has_to_wait
"""
_OF_LANES: Final = f"""
SELECT {tables.TRIGGERS.names} FROM job_store.triggers
JOIN (SELECT DISTINCT * FROM unnest($1::text[], $2::text[]) AS k (store_id, trigger_id)) AS k
USING (store_id, trigger_id)
"""
_WAIT: Final = "SELECT extract(epoch FROM min(claim_at) - clock_timestamp())::float8 FROM job_store.trigger_lanes"


# A lease is renewed once half of it has passed. A process takes new leases up to its limit, starting with those that
# expired first. Rows are locked in key order against deadlocks, and checked again under the lock.
_LEASE_MAILBOXES: Final = f"""
WITH held AS MATERIALIZED (
    SELECT store_id, trigger_id, claim_at <= now() + $2::interval / 2 AS is_due FROM job_store.triggers
    WHERE reader_id = $1 AND claim_at > now()
), wanted AS MATERIALIZED (
    SELECT store_id, trigger_id FROM held WHERE is_due
    UNION ALL
    (SELECT store_id, trigger_id FROM job_store.triggers WHERE claim_at <= now()
    ORDER BY claim_at LIMIT greatest($3 - (SELECT count(*) FROM held), 0))
), due AS MATERIALIZED (
    SELECT t.store_id, t.trigger_id FROM job_store.triggers AS t JOIN wanted USING (store_id, trigger_id)
    WHERE t.claim_at <= now() OR (t.reader_id = $1 AND t.claim_at <= now() + $2::interval / 2)
    ORDER BY t.store_id, t.trigger_id FOR UPDATE OF t
), leased AS (
    UPDATE job_store.triggers AS t SET reader_id = $1, claim_at = now() + $2::interval
    FROM due WHERE t.store_id = due.store_id AND t.trigger_id = due.trigger_id
    RETURNING t.*
)
SELECT {tables.TRIGGERS.names} FROM leased
UNION ALL
SELECT {tables.TRIGGERS.names} FROM job_store.triggers JOIN held USING (store_id, trigger_id) WHERE NOT held.is_due
"""


class PostgresTriggers(PostgresStarters[TriggerRow]):
    def __init__(self, database: Database) -> None:
        super().__init__(database, tables.TRIGGERS, tables.TRIGGERS.read)

    async def of_id(self, store_id: StoreId, trigger_id: str) -> tuple[TriggerRow, datetime] | None:
        """Return a trigger of any user, and the current time, or None if there is no such trigger."""
        record = await self._database.fetchrow(_OF_ID, store_id, trigger_id)
        return None if record is None else (self._readable(record), record["now"])

    async def add_refusals(self, key: TriggerKey, count: int, reason: str) -> None:
        await self._database.execute(_ADD_REFUSALS, key.store_id, key.trigger_id, count, reason)

    async def claim(self, *, events_max: int) -> Sequence[tuple[TriggerRow, LaneRow]]:
        """Claim waiting events that may fire now. Return their triggers and lanes."""
        lease, poll = timedelta(seconds=CLAIM_SECONDS), timedelta(seconds=POLL_SECONDS)
        lanes = list(map(tables.LANES.read, await self._database.fetch(_CLAIM, events_max, lease, poll)))
        owners = [row.store_id for row in lanes], [row.trigger_id for row in lanes]
        records = await self._database.fetch(_OF_LANES, *owners) if lanes else ()
        triggers = {row.key: row for row in _read(records)}
        keys = [TriggerKey(row.store_id, row.trigger_id) for row in lanes]
        found = zip(keys, lanes, strict=True)
        return tuple((triggers[key], row) for key, row in found if key in triggers)

    async def wait_seconds(self) -> float | None:
        """Return the number of seconds until the next event can be claimed, or None if there is none."""
        seconds: float | None = await self._database.fetchval(_WAIT)
        return seconds

    async def lease_mailboxes(self, reader_id: str) -> Sequence[TriggerRow]:
        """Lease mailboxes to a process, and renew its existing leases.

        Return the triggers of all its leased mailboxes.
        """
        return _read(await self._database.fetch(_LEASE_MAILBOXES, reader_id, MAILBOX_LEASE_TIME, LEASED_MAX))


def _read(records: Sequence[Record]) -> Sequence[TriggerRow]:
    return read_each("trigger", records, tables.TRIGGERS.read, itemgetter("trigger_id"))
