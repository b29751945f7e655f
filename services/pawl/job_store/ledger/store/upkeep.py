"""Work that the ledger does beside its callers' on PostgreSQL: offers and counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from asyncpg import Record

from pawl.chassis.db.database import Database, DatabaseAdapter
from pawl.chassis.ids import CallKey, ClientId, RunId, RunKey, StoreId, UserId
from pawl.job_store.ledger.rules.places import PlaceLimits
from pawl.values import RunState

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

# Of the background, what is queued could begin; what waits has a time at which it goes on, for its next iteration or if
# nobody decides. What is late was due and nobody has taken it, for want of a worker or of a place.
_OPEN_RUNS: Final = """
SELECT state, count(*) AS runs,
    count(*) FILTER (WHERE in_background AND active) AS working,
    count(*) FILTER (WHERE is_job AND (state = 1 OR (round = 0 AND claim_at <= now()))) AS queued,
    count(*) FILTER (WHERE is_job AND state <> 1 AND (round > 0 OR claim_at > now())) AS waiting,
    count(*) FILTER (WHERE is_job AND claim_at < now() - interval '5 s') AS late
FROM (SELECT *, in_background AND NOT active AND claim_at IS NOT NULL AS is_job FROM job_store.runs) AS r
WHERE state < 10 GROUP BY state
"""
_JOBS: Final = ("working", "queued", "waiting", "late")
# What is told to nobody any more is left out. Counting stops here, too.
_NOTICES: Final = """
SELECT coalesce(sum(notices_pending), 0) AS notices_pending, coalesce(sum(notices_entered), 0) AS notices_entered
FROM (
    SELECT notices_pending, notices_entered FROM job_store.conversations
    WHERE notices_pending + notices_entered > 0 AND user_id <> '' LIMIT 100000
) AS told
"""
# Counting stops here: more is "very many" to whoever looks.
_BACKLOG: Final = """
WITH due AS MATERIALIZED (
    SELECT store_id, user_id, active, in_background FROM job_store.runs
    WHERE claim_at <= now() AND claim_at IS NOT NULL LIMIT 100000
), taken AS MATERIALIZED (
    SELECT store_id, user_id, count(*) AS runs FROM job_store.runs WHERE active AND NOT in_background
    GROUP BY store_id, user_id
), of_users AS (
    SELECT w.store_id, w.runs, least(w.runs, greatest($2 - coalesce(t.runs, 0), 0)) AS fit
    FROM (SELECT store_id, user_id, count(*) AS runs FROM due WHERE NOT active AND NOT in_background
        GROUP BY store_id, user_id) AS w
    LEFT JOIN taken AS t USING (store_id, user_id)
), of_stores AS (
    SELECT u.runs, u.runs - u.fit AS over_user,
           u.fit - least(u.fit, greatest($1 - coalesce(t.runs, 0), 0)) AS over_store
    FROM (SELECT store_id, sum(runs) AS runs, sum(fit) AS fit FROM of_users GROUP BY store_id) AS u
    LEFT JOIN (SELECT store_id, sum(runs) AS runs FROM taken GROUP BY store_id) AS t USING (store_id)
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
    """See `ports.OfferRepository`."""

    async def held_by(
        self, store_id: StoreId, user_id: UserId, client_id: ClientId, run_id: RunId
    ) -> tuple[tuple[RunKey, CallKey], ...]:
        return tuple(map(_keys, await self._database.fetch(_HELD_BY, store_id, user_id, client_id, run_id)))

    async def run_out(self, *, calls_max: int) -> tuple[tuple[RunKey, CallKey], ...]:
        return tuple(map(_keys, await self._database.fetch(_RUN_OUT, calls_max)))


class PostgresLedgerStats:
    """Counts the ledger, for metrics."""

    def __init__(self, database: Database, limits: PlaceLimits) -> None:
        self._database = database
        self._limits = limits

    async def count(self) -> Mapping[str, float]:
        """Return runs by open state (`QUEUED`...), the `outbox` backlog, `due_schedules` and `due_events`.

        The last two are those that nobody has claimed. Of jobs, and what they begin, `working`, `waiting` and `late`.
        Of the runs that are due, `claimable` are those that a worker could have now; the others wait for
        a place, `over_user_limit` of them also if their store had any number of places, `over_store_limit` not.
        """
        async with self._database.transaction() as connection:
            runs = {record["state"]: record for record in await connection.fetch(_OPEN_RUNS)}
            notices = await connection.fetchrow(_NOTICES)
            # Two of its parts have no index: with nested loops only, its time would grow with their product.
            await connection.execute("SET LOCAL enable_hashjoin = on")
            backlog = await connection.fetchrow(_BACKLOG, self._limits.per_store, self._limits.per_user)
        states = dict.fromkeys((state.name for state in RunState if not state.is_terminal), 0)
        states |= {RunState(state).name: record["runs"] for state, record in runs.items()}
        jobs = {name: sum(record[name] for record in runs.values()) for name in _JOBS}
        return {name: float(count) for each in (states, jobs, backlog, notices) for name, count in (each or {}).items()}


def _keys(record: Record) -> tuple[RunKey, CallKey]:
    return RunKey(record["store_id"], record["run_id"]), CallKey(record["store_id"], record["call_id"])
