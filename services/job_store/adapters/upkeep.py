"""Work that the ledger does beside its callers' on PostgreSQL: offers, retention, counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from asyncpg import Record

from services.chassis.database import Database
from services.job_store.domain.places import PlaceLimits
from services.job_store.domain.rows import CallKey, RunKey
from services.job_store.domain.states import RunState

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

_OLD_REQUESTS: Final = """
DELETE FROM job_store.requests WHERE (store_id, user_id, request_id) IN (
    SELECT store_id, user_id, request_id FROM job_store.requests
    WHERE create_time < now() - make_interval(secs => $1) ORDER BY create_time LIMIT $2
)
"""
_OLD_SENT: Final = """
DELETE FROM job_store.sent WHERE id IN (
    SELECT id FROM job_store.sent WHERE sent_time < now() - make_interval(secs => $1) ORDER BY sent_time LIMIT $2
)
"""
# The events of a run whose end is still in the outbox have not all been sent.
_TRIM: Final = """
WITH old AS MATERIALIZED (
    SELECT store_id, run_id, end_time, last_seq FROM job_store.runs AS r
    WHERE trimmed_seq = 0 AND end_time < now() - make_interval(secs => $1) AND last_seq > 1
    AND NOT EXISTS (SELECT FROM job_store.outbox AS o WHERE o.store_id = r.store_id AND o.run_id = r.run_id)
    ORDER BY end_time LIMIT $3 FOR UPDATE SKIP LOCKED
), part AS MATERIALIZED (
    SELECT store_id, run_id, last_seq FROM (
        SELECT *, sum(last_seq) OVER (ORDER BY end_time, store_id, run_id) - last_seq AS events_before FROM old
    ) AS counted WHERE events_before < $2
), trimmed AS (
    DELETE FROM job_store.events AS e USING part AS p
    WHERE e.store_id = p.store_id AND e.run_id = p.run_id AND e.seq < p.last_seq
)
UPDATE job_store.runs AS r SET trimmed_seq = p.last_seq - 1 FROM part AS p
WHERE r.store_id = p.store_id AND r.run_id = p.run_id
"""
_TRIMMED_RUNS_MAX: Final = 100
_OLD_CONVERSATIONS: Final = """
SELECT store_id, conversation_id FROM job_store.conversations
WHERE active_run_id IS NULL AND update_time < now() - make_interval(secs => $1)
ORDER BY update_time LIMIT $2 FOR UPDATE SKIP LOCKED
"""
_REMOVALS: Final = (
    # First the runs, as whoever trims logs does: else two would wait for each other.
    """SELECT FROM job_store.runs AS t, unnest($1::text[], $2::text[]) AS k (s, c)
    WHERE t.store_id = k.s AND t.conversation_id = k.c FOR UPDATE OF t""",
    """DELETE FROM job_store.events AS t USING job_store.runs AS r, unnest($1::text[], $2::text[]) AS k (s, c)
    WHERE r.store_id = k.s AND r.conversation_id = k.c AND t.store_id = r.store_id AND t.run_id = r.run_id""",
    """DELETE FROM job_store.commands AS t USING job_store.runs AS r, unnest($1::text[], $2::text[]) AS k (s, c)
    WHERE r.store_id = k.s AND r.conversation_id = k.c AND t.store_id = r.store_id AND t.run_id = r.run_id""",
    """DELETE FROM job_store.calls AS t USING job_store.runs AS r, unnest($1::text[], $2::text[]) AS k (s, c)
    WHERE r.store_id = k.s AND r.conversation_id = k.c AND t.store_id = r.store_id AND t.run_id = r.run_id""",
    """DELETE FROM job_store.messages AS t USING unnest($1::text[], $2::text[]) AS k (s, c)
    WHERE t.store_id = k.s AND t.conversation_id = k.c""",
    """DELETE FROM job_store.runs AS t USING unnest($1::text[], $2::text[]) AS k (s, c)
    WHERE t.store_id = k.s AND t.conversation_id = k.c""",
    """DELETE FROM job_store.conversations AS t USING unnest($1::text[], $2::text[]) AS k (s, c)
    WHERE t.store_id = k.s AND t.conversation_id = k.c""",
)

_OPEN_RUNS: Final = "SELECT state, count(*) AS runs FROM job_store.runs WHERE state < 10 GROUP BY state"
# Counting stops here: more is "very many" to whoever looks.
_BACKLOG: Final = """
WITH due AS MATERIALIZED (
    SELECT store_id, user_id, active FROM job_store.runs WHERE claim_at <= now() AND claim_at IS NOT NULL LIMIT 100000
), taken AS MATERIALIZED (
    SELECT store_id, user_id, count(*) AS runs FROM job_store.runs WHERE active GROUP BY store_id, user_id
), of_users AS (
    SELECT w.store_id, w.runs, least(w.runs, greatest($2 - coalesce(t.runs, 0), 0)) AS fit
    FROM (SELECT store_id, user_id, count(*) AS runs FROM due WHERE NOT active GROUP BY store_id, user_id) AS w
    LEFT JOIN taken AS t USING (store_id, user_id)
), of_stores AS (
    SELECT u.runs, u.runs - u.fit AS over_user,
           u.fit - least(u.fit, greatest($1 - coalesce(t.runs, 0), 0)) AS over_store
    FROM (SELECT store_id, sum(runs) AS runs, sum(fit) AS fit FROM of_users GROUP BY store_id) AS u
    LEFT JOIN (SELECT store_id, sum(runs) AS runs FROM taken GROUP BY store_id) AS t USING (store_id)
)
SELECT (SELECT count(*) FROM due WHERE active) + coalesce(sum(runs - over_user - over_store), 0) AS claimable,
       coalesce(sum(over_user), 0) AS over_user_limit,
       coalesce(sum(over_store), 0) AS over_store_limit,
       (SELECT count(*) FROM (SELECT FROM job_store.outbox LIMIT 100000) AS waiting) AS outbox
FROM of_stores
"""


class PostgresOfferBook:
    """See `ports.OfferBook`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def held_by(
        self, store_id: str, user_id: str, client_id: str, run_id: str
    ) -> tuple[tuple[RunKey, CallKey], ...]:
        async with self._database.acquire() as connection:
            records = await connection.fetch(_HELD_BY, store_id, user_id, client_id, run_id)
        return tuple(map(_keys, records))

    async def run_out(self, *, calls_max: int) -> tuple[tuple[RunKey, CallKey], ...]:
        async with self._database.acquire() as connection:
            records = await connection.fetch(_RUN_OUT, calls_max)
        return tuple(map(_keys, records))


class PostgresAttic:
    """See `ports.Attic`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def remove_requests(self, *, older_than_seconds: float, rows_max: int) -> int:
        async with self._database.acquire() as connection:
            tag = await connection.execute(_OLD_REQUESTS, older_than_seconds, rows_max)
        return int(tag.rpartition(" ")[2])

    async def remove_sent(self, *, older_than_seconds: float, rows_max: int) -> int:
        async with self._database.acquire() as connection:
            tag = await connection.execute(_OLD_SENT, older_than_seconds, rows_max)
        return int(tag.rpartition(" ")[2])

    async def trim_logs(self, *, older_than_seconds: float, events_max: int) -> int:
        async with self._database.acquire() as connection:
            tag = await connection.execute(_TRIM, older_than_seconds, events_max, _TRIMMED_RUNS_MAX)
        return int(tag.rpartition(" ")[2])

    async def remove_conversations(self, *, older_than_seconds: float, rows_max: int) -> int:
        async with self._database.transaction() as connection:
            records = await connection.fetch(_OLD_CONVERSATIONS, older_than_seconds, rows_max)
            stores = [record["store_id"] for record in records]
            conversations = [record["conversation_id"] for record in records]
            for statement in _REMOVALS if records else ():
                await connection.execute(statement, stores, conversations)
        return len(records)


class PostgresCensus:
    """See `ports.Census`."""

    def __init__(self, database: Database, limits: PlaceLimits) -> None:
        self._database = database
        self._limits = limits

    async def count(self) -> Mapping[str, float]:
        async with self._database.transaction() as connection:
            runs = {record["state"]: record["runs"] for record in await connection.fetch(_OPEN_RUNS)}
            # Two of its parts have no index: with nested loops only, its time would grow with their product.
            await connection.execute("SET LOCAL enable_hashjoin = on")
            backlog = await connection.fetchrow(_BACKLOG, self._limits.per_store, self._limits.per_user)
        counts = {state.name: float(runs.get(state, 0)) for state in RunState if not state.is_terminal}
        return counts | ({} if backlog is None else {name: float(count) for name, count in backlog.items()})


def _keys(record: Record) -> tuple[RunKey, CallKey]:
    return (record["store_id"], record["run_id"]), (record["store_id"], record["call_id"])
