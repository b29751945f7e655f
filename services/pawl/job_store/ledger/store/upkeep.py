"""Maintains the ledger in PostgreSQL: expired offers, counts for metrics, trims and usage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec
from asyncpg import Record
from msgspec.structs import astuple

from pawl.chassis.ids import CallKey, ClientId, RunId, RunKey, StoreId, UserId
from pawl.event.v1 import agent_pb2, run_pb2
from pawl.job_store.ledger.rules.slots import StoreSlots
from pawl.job_store.ledger.rules.trimming import Trim
from pawl.job_store.ledger.rules.usage import UsageKey, Used, day_end, month_end
from pawl.job_store.ledger.store.columns import IS_HEAD, Statement, Write
from pawl.server.db.database import Connection, Database, DatabaseAdapter
from pawl.values import CallState, RunState, Usage, WaitKind

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
        """Return counts of runs by open state (`QUEUED`, ...), of notices, and of events and schedules that wait.

        These are `outbox` events, `due_schedules` and `due_events`. `due_schedules` and `due_events` leave out what a
        worker has claimed. Background runs are counted as `working`, `queued`, `waiting` and `late`. `claimable` counts
        the due runs that could be claimed now. The other due runs wait for a slot: `over_user_limit` because of the
        user's limit, and `over_store_limit` because of the store's limit.
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


# The statements are built only from constants in this module.
# ruff: noqa: S608

_FIGURES: Final = Used.__struct_fields__
_NAMES: Final = ", ".join(("store_id", "agent_name", "day", "user_id", *_FIGURES))
# Counts are capped so that sums over all users stay in range.
_COUNT_MAX: Final = 2**62
_SUMS: Final = ", ".join(f"least(u.{name}, {_COUNT_MAX}) + excluded.{name}" for name in _FIGURES)
_KEY: Final = "store_id, agent_name, day, user_id"
# By code point, as transactions sort them, whatever the database's collation: both lock the rows in the same order.
_ORDER: Final = 'store_id COLLATE "C", agent_name COLLATE "C", day, user_id COLLATE "C"'
_ON_CONFLICT: Final = f"ON CONFLICT ({_KEY}, slot) DO UPDATE SET ({', '.join(_FIGURES)}) = ROW({_SUMS})"
_TYPES: Final = ("text", "text", "date", "text", *["bigint"] * len(_FIGURES))
_ADD: Final = Statement(
    f"""INSERT INTO job_store.usage_days AS u (slot, {_NAMES})
    SELECT pg_backend_pid() % 8, k.* FROM ({{rows}}) AS k ({_NAMES}) {_ON_CONFLICT}""",
    _TYPES,
    gathered=False,
)
_ADD_GUARDED: Final = Statement(
    f"""INSERT INTO job_store.usage_days AS u (slot, {_NAMES})
    SELECT pg_backend_pid() % 8, {_KEY}, {", ".join(f"least(sum({name}), {_COUNT_MAX})::bigint" for name in _FIGURES)}
    FROM ({{rows}}) AS u (head, {_NAMES}) WHERE {IS_HEAD} GROUP BY {_KEY} ORDER BY {_ORDER} {_ON_CONFLICT}""",
    ("integer", *_TYPES),
    gathered=False,
)


def _count(total: str) -> str:
    # An estimate that was too high on the day before may make the sum negative.
    return f"greatest(least(coalesce({total}, 0), {_COUNT_MAX}), 0)::bigint"


_OF_AGENT: Final = f"""
SELECT day, count(DISTINCT user_id) AS users, {", ".join(f"{_count(f'sum({n})')} AS {n}" for n in _FIGURES)}
FROM job_store.usage_days
WHERE store_id = $1 AND agent_name = $2 AND day > (now() AT TIME ZONE 'UTC')::date - $3::integer
GROUP BY day ORDER BY day DESC
"""


_TODAY: Final = f"""
SELECT {_count("sum(input_tokens) + sum(output_tokens)")} AS tokens,
    ((now() AT TIME ZONE 'UTC')::date + 1)::timestamp AT TIME ZONE 'UTC' AS day_end_time
FROM job_store.usage_days WHERE store_id = $1 AND agent_name = $2 AND day = (now() AT TIME ZONE 'UTC')::date
"""


_TOKENS_ADDED: Final = f"""INSERT INTO job_store.token_days AS t (slot, store_id, user_id, day, tokens)
SELECT pg_backend_pid() % 8, u.store_id, k.user_id, u.day, least(sum(u.tokens), {_COUNT_MAX})::bigint
FROM ({{rows}}) AS u ({{names}}) CROSS JOIN LATERAL (VALUES (u.user_id), ('')) AS k (user_id){{guard}}
GROUP BY u.store_id, k.user_id, u.day ORDER BY u.store_id COLLATE "C", k.user_id COLLATE "C", u.day
ON CONFLICT (store_id, user_id, day, slot)
DO UPDATE SET tokens = least(t.tokens, {_COUNT_MAX}) + excluded.tokens"""
_TOKEN_NAMES: Final = ("store_id", "user_id", "day", "tokens")
_TOKEN_TYPES: Final = ("text", "text", "date", "bigint")
_ADD_TOKENS: Final = Statement(
    _TOKENS_ADDED.format(rows="{rows}", names=", ".join(_TOKEN_NAMES), guard=""), _TOKEN_TYPES, gathered=False
)
_ADD_TOKENS_GUARDED: Final = Statement(
    _TOKENS_ADDED.format(rows="{rows}", names=", ".join(("head", *_TOKEN_NAMES)), guard=f" WHERE {IS_HEAD}"),
    ("integer", *_TOKEN_TYPES),
    gathered=False,
)
_TOKENS: Final = f"""
SELECT t.user_id, now() AS now, {_count("sum(t.tokens)")} AS month,
    {_count("sum(t.tokens) FILTER (WHERE t.day = today.day)")} AS day
FROM (SELECT (now() AT TIME ZONE 'UTC')::date AS day) AS today
CROSS JOIN (SELECT DISTINCT unnest(ARRAY['', $2::text])) AS k (user_id)
LEFT JOIN job_store.token_days AS t ON t.store_id = $1 AND t.user_id = k.user_id
    AND t.day BETWEEN date_trunc('month', today.day)::date AND today.day
GROUP BY t.user_id
"""


def additions(counts: Sequence[tuple[UsageKey, Used]], heads: Sequence[int] | None = None) -> list[Write]:
    """Return the writes that add to usage counts: without `heads`, in key order, to avoid deadlocks."""
    if not counts:
        return []
    numbers = [None] * len(counts) if heads is None else heads
    tokens = [
        (number, key.store_id, key.user_id, key.day, used.own_tokens)
        for number, (key, used) in zip(numbers, counts, strict=True)
        if used.own_tokens
    ]
    columns = list(zip(*((*astuple(key), *astuple(used)) for key, used in counts), strict=True))
    of_tokens = list(zip(*tokens, strict=True))
    if heads is None:
        return [Write(_ADD, columns), *([Write(_ADD_TOKENS, of_tokens[1:])] if tokens else [])]
    return [Write(_ADD_GUARDED, [heads, *columns]), *([Write(_ADD_TOKENS_GUARDED, of_tokens)] if tokens else [])]


class PostgresUsage(DatabaseAdapter):
    async def of_agent(self, store_id: StoreId, name: str, *, days: int) -> Sequence[agent_pb2.AgentUsage]:
        """Return an agent's usage on each of the last `days` days, newest first. Days without usage are left out."""
        return [
            agent_pb2.AgentUsage(
                day=record["day"].isoformat(),
                runs=record["runs"],
                users=record["users"],
                usage=run_pb2.Usage(**{name: record[name] for name in Usage.__struct_fields__}),
            )
            for record in await self._database.fetch(_OF_AGENT, store_id, name, days)
        ]

    async def today(self, store_id: StoreId, name: str) -> tuple[int, datetime]:
        """Return the tokens that an agent has used today (UTC), and the time when the day ends."""
        record = (await self._database.fetch(_TODAY, store_id, name))[0]
        return record["tokens"], record["day_end_time"]

    async def tokens(self, store_id: StoreId, user_id: UserId) -> Mapping[WaitKind, tuple[int, datetime]]:
        """Return the tokens that the store and the user have used this day and month (UTC), and when these end."""
        rows = {row["user_id"]: row for row in await self._database.fetch(_TOKENS, store_id, user_id)}
        now = next(iter(rows.values()))["now"]
        used = {each: (rows[each]["day"], rows[each]["month"]) if each in rows else (0, 0) for each in ("", user_id)}
        return {
            WaitKind.STORE_DAILY_TOKENS: (used[""][0], day_end(now)),
            WaitKind.STORE_MONTHLY_TOKENS: (used[""][1], month_end(now)),
            WaitKind.USER_DAILY_TOKENS: (used[user_id][0], day_end(now)),
            WaitKind.USER_MONTHLY_TOKENS: (used[user_id][1], month_end(now)),
        }
