"""Maintains the ledger in PostgreSQL: expired offers, counts for metrics, and trims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from asyncpg import Record

from pawl.chassis.ids import CallKey, ClientId, RunId, RunKey, StoreId, UserId
from pawl.job_store.ledger.rules.slots import StoreSlots
from pawl.job_store.ledger.rules.trimming import Trim
from pawl.server.db.database import Connection, Database, DatabaseAdapter
from pawl.values import CallState, RunState, WaitKind

_HELD_BY: Final = """
SELECT store_id, run_id, call_id FROM job_store.calls
WHERE store_id = $1 AND user_id = $2 AND offer_client_id = $3 AND ($4 = '' OR run_id = $4)
AND state = 3 AND offer_client_id <> ''
ORDER BY run_id, call_id
"""
_RUN_OUT: Final = """
SELECT store_id, run_id, call_id FROM job_store.calls
WHERE state = 3 AND offer_client_id <> '' AND offer_expire_time <= now() AND reserved_by = ''
ORDER BY offer_expire_time LIMIT $1
"""

# Background runs are `queued` if they could start, `waiting` if they continue at a certain time (for the next iteration
# or a deadline), and `late` if no worker has claimed them within 5 s, for lack of a worker or a slot.
_RUNS_BY_STATE: Final = """
SELECT state, waits, count(*) AS runs,
    count(*) FILTER (WHERE in_background AND active) AS working,
    count(*) FILTER (WHERE is_job AND (state = 1 OR (round = 0 AND claim_at <= now()))) AS queued,
    count(*) FILTER (WHERE is_job AND state <> 1 AND (round > 0 OR claim_at > now())) AS waiting,
    count(*) FILTER (WHERE is_job AND claim_at < now() - interval '5 s') AS late
FROM (SELECT *, in_background AND NOT active AND claim_at IS NOT NULL AS is_job FROM job_store.runs) AS r
WHERE state < 10 GROUP BY state, waits
"""
_JOBS: Final = ("working", "queued", "waiting", "late")
# Notices of erased conversations do not count. At most 100,000 conversations are counted.
_NOTICES: Final = """
SELECT coalesce(sum(notices_pending), 0) AS notices_pending, coalesce(sum(notices_entered), 0) AS notices_entered
FROM (
    SELECT notices_pending, notices_entered FROM job_store.conversations
    WHERE notices_pending + notices_entered > 0 AND user_id <> '' LIMIT 100000
) AS notices
"""
# Each of these counts stops at 100,000.
_BACKLOG: Final = """
WITH due AS MATERIALIZED (
    SELECT store_id, user_id, active, in_background FROM job_store.runs
    WHERE claim_at <= now() AND claim_at IS NOT NULL LIMIT 100000
), taken AS MATERIALIZED (
    SELECT store_id, user_id, count(*) AS runs FROM job_store.runs WHERE active AND NOT in_background
    GROUP BY store_id, user_id
), of_users AS (
    SELECT w.store_id, w.runs, least(w.runs, greatest(l.per_user - coalesce(t.runs, 0), 0)) AS fit
    FROM (SELECT store_id, user_id, count(*) AS runs FROM due WHERE NOT active AND NOT in_background
        GROUP BY store_id, user_id) AS w
    LEFT JOIN taken AS t USING (store_id, user_id)
    CROSS JOIN LATERAL (SELECT coalesce(($3::jsonb -> w.store_id -> 1)::integer, $2) AS per_user) AS l
), of_stores AS (
    SELECT u.runs, u.runs - u.fit AS over_user,
           u.fit - least(u.fit, greatest(l.per_store - coalesce(t.runs, 0), 0)) AS over_store
    FROM (SELECT store_id, sum(runs) AS runs, sum(fit) AS fit FROM of_users GROUP BY store_id) AS u
    LEFT JOIN (SELECT store_id, sum(runs) AS runs FROM taken GROUP BY store_id) AS t USING (store_id)
    CROSS JOIN LATERAL (SELECT coalesce(($3::jsonb -> u.store_id -> 0)::integer, $1) AS per_store) AS l
)
SELECT (SELECT count(*) FROM due WHERE active OR in_background) + coalesce(sum(runs - over_user - over_store), 0)
           AS claimable,
       coalesce(sum(over_user), 0) AS over_user_limit,
       coalesce(sum(over_store), 0) AS over_store_limit,
       (SELECT count(*) FROM (SELECT FROM job_store.outbox LIMIT 100000) AS waiting) AS outbox,
       (SELECT count(*) FROM (SELECT FROM job_store.schedules WHERE claim_at <= now() LIMIT 100000) AS due)
           AS due_schedules,
       (SELECT count(*) FROM (SELECT FROM job_store.trigger_lanes WHERE claim_at <= now() LIMIT 100000) AS due)
           AS due_events
FROM of_stores
"""


class PostgresOfferRepository(DatabaseAdapter):
    async def held_by(
        self, store_id: StoreId, user_id: UserId, client_id: ClientId, run_id: RunId
    ) -> tuple[tuple[RunKey, CallKey], ...]:
        return tuple(map(_keys, await self._database.fetch(_HELD_BY, store_id, user_id, client_id, run_id)))

    async def run_out(self, *, calls_max: int) -> tuple[tuple[RunKey, CallKey], ...]:
        return tuple(map(_keys, await self._database.fetch(_RUN_OUT, calls_max)))


class PostgresLedgerStats:
    def __init__(self, database: Database, slots: StoreSlots) -> None:
        self._database = database
        self._slots = slots

    async def count(self) -> Mapping[str, float]:
        """Return counts of runs by open state (`QUEUED`, ...), of notices, and of waiting events and schedules.

        The counts of waiting events and schedules are `outbox`, `due_schedules` and `due_events`. The last two exclude
        schedules and events that a worker has claimed. The counts of background runs are `working`, `queued`, `waiting`
        and `late`. `claimable` counts the due runs that could be claimed now. The other due runs are waiting for a
        slot: `over_user_limit` because of the user's limit, and `over_store_limit` because of the store's limit.
        """
        default = self._slots.default
        own = msgspec.json.encode(
            {store: (limits.per_store, limits.per_user) for store, limits in self._slots.overrides.items()}
        ).decode()
        async with self._database.transaction() as connection:
            runs = await connection.fetch(_RUNS_BY_STATE)
            notices = await connection.fetchrow(_NOTICES)
            # Two of the joined parts have no index: with nested loops, the time would grow with their product.
            await connection.execute("SET LOCAL enable_hashjoin = on")
            backlog = await connection.fetchrow(_BACKLOG, default.per_store, default.per_user, own)
        states = dict.fromkeys((state.name for state in RunState if not state.is_terminal), 0)
        waits = dict.fromkeys((kind.name for kind in WaitKind), 0)
        for record in runs:
            states[RunState(record["state"]).name] += record["runs"]
            for kind in record["waits"] if record["state"] == RunState.WAITING else ():
                waits[WaitKind(kind).name] += record["runs"]
        jobs = {name: sum(record[name] for record in runs) for name in _JOBS}
        parts = (states, waits, jobs, backlog, notices)
        return {name: float(count) for each in parts for name, count in (each or {}).items()}


def _keys(record: Record) -> tuple[RunKey, CallKey]:
    return RunKey(record["store_id"], record["run_id"]), CallKey(record["store_id"], record["call_id"])


# Removes the calls with the commands that decided them or reported the ends of their child runs. Failures are counted.
_CALLS: Final = """
WITH gone AS (
    DELETE FROM job_store.calls AS c USING unnest($1::text[], $2::text[], $3::integer[]) AS k (store_id, run_id, round)
    WHERE c.store_id = k.store_id AND c.run_id = k.run_id AND c.round <= k.round AND c.state >= 10
    RETURNING c.store_id, c.run_id, c.call_id, c.state
), counted AS (
    UPDATE job_store.runs AS r SET trimmed_failures = r.trimmed_failures + g.failures
    FROM (SELECT store_id, run_id, count(*) FILTER (WHERE state <> $4) AS failures FROM gone GROUP BY 1, 2) AS g
    WHERE r.store_id = g.store_id AND r.run_id = g.run_id
)
DELETE FROM job_store.commands AS m USING gone AS g
WHERE m.store_id = g.store_id AND m.run_id = g.run_id AND m.call_id = g.call_id AND m.consumed
"""
# Rows with later events or events still to be sent stay until the next trim. No reader gets their trimmed events.
_EVENTS: Final = """
DELETE FROM job_store.events AS e USING unnest($1::text[], $2::text[], $3::bigint[]) AS k (store_id, run_id, seq)
WHERE e.store_id = k.store_id AND e.run_id = k.run_id AND e.last_seq <= k.seq AND NOT EXISTS (
    SELECT FROM job_store.outbox AS o
    WHERE o.store_id = e.store_id AND o.run_id = e.run_id AND o.seq BETWEEN e.first_seq AND e.last_seq
)
"""


async def remove(connection: Connection, trims: Sequence[Trim]) -> None:
    """Remove trimmed rows. The runs must be locked."""
    stores, runs = [trim.run.store_id for trim in trims], [trim.run.run_id for trim in trims]
    await connection.execute(_CALLS, stores, runs, [trim.round for trim in trims], CallState.SUCCEEDED)
    await connection.execute(_EVENTS, stores, runs, [trim.seq for trim in trims])
