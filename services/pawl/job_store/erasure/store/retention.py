"""Removes expired rows from PostgreSQL in batches, so that transactions stay small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from pawl.chassis.ids import StoreId
from pawl.job_store.ledger.rules.usage import DAYS_MAX, HOURS_DAYS_MAX
from pawl.job_store.ledger.store import tables, usage
from pawl.job_store.ledger.store.columns import joined
from pawl.server.db.database import Connection, Database, DatabaseAdapter, affected

# The statements are built only from constants in this module.
# ruff: noqa: S608

_OLD_REQUESTS: Final = """
DELETE FROM job_store.requests WHERE (store_id, user_id, request_id) IN (
    SELECT store_id, user_id, request_id FROM job_store.requests
    WHERE create_time < now() - make_interval(secs => $1) ORDER BY create_time LIMIT $2
)
"""
_OLD_USAGE: Final = """
DELETE FROM job_store.usage_hours WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM job_store.usage_hours WHERE day <= (now() AT TIME ZONE 'UTC')::date - $1::integer LIMIT $2
))
"""
# The merged row of a day has the hour -1. Only this statement writes rows of old days.
_MERGED: Final = usage.NAMES.replace("hour", "-1 AS hour", 1)
_OLD_HOURS: Final = f"""
WITH gone AS (
    DELETE FROM job_store.usage_hours WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM job_store.usage_hours
        WHERE day <= (now() AT TIME ZONE 'UTC')::date - $1::integer AND hour >= 0 ORDER BY day LIMIT $2
    )) RETURNING *
), merged AS (
    INSERT INTO job_store.usage_hours AS u (slot, {usage.NAMES})
    SELECT 0, {usage.KEY}, {usage.totals(usage.FIGURES)} FROM (SELECT {_MERGED} FROM gone) AS old
    GROUP BY {usage.KEY} ORDER BY {usage.ORDER} {usage.on_conflict(usage.FIGURES)}
)
SELECT count(*) FROM gone
"""
_OLD_TOKENS: Final = _OLD_USAGE.replace("usage_hours", "token_days")
_OLD_RATES: Final = """
DELETE FROM job_store.model_rates WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM job_store.model_rates WHERE unused_time < now() - interval '1 hour' LIMIT $1
))
"""
_OLD_CALLS: Final = """
DELETE FROM job_store.model_calls WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM job_store.model_calls WHERE expire_time < now() LIMIT $1
))
"""
_OLD_UNSENT: Final = """
DELETE FROM job_store.outbox WHERE id IN (
    SELECT id FROM job_store.outbox WHERE "time" < now() - make_interval(secs => $1) ORDER BY id LIMIT $2
)
"""
_OLD_SENT: Final = """
DELETE FROM job_store.sent WHERE id IN (
    SELECT id FROM job_store.sent WHERE sent_time < now() - make_interval(secs => $1) ORDER BY sent_time LIMIT $2
)
"""
_OLD_KEYS: Final = """
DELETE FROM job_store.api_keys WHERE key_id IN (
    SELECT key_id FROM job_store.api_keys WHERE least(revoke_time, expire_time) < now() - make_interval(secs => $1)
    ORDER BY least(revoke_time, expire_time) LIMIT $2
)
"""
_OLD_TRIGGER_EVENTS: Final = """
DELETE FROM job_store.trigger_events WHERE (store_id, trigger_id, event_id) IN (
    SELECT store_id, trigger_id, event_id FROM job_store.trigger_events
    WHERE fire_time < now() - make_interval(secs => $1) AND outcome <> 2 ORDER BY fire_time LIMIT $2
)
"""
# Lanes without a waiting event or an open run. Their triggers are locked too, as when firing.
_OLD_LANES: Final = """
WITH old AS MATERIALIZED (
    SELECT l.store_id, l.trigger_id, l.lane
    FROM job_store.trigger_lanes AS l JOIN job_store.triggers AS t USING (store_id, trigger_id)
    WHERE l.update_time < now() - make_interval(secs => $1) AND l.event_id = '' AND coalesce((
        SELECT r.state FROM job_store.runs AS r WHERE r.store_id = l.store_id AND r.run_id = l.last_run_id
    ) >= 10, true)
    ORDER BY l.update_time LIMIT $2 FOR UPDATE OF t, l SKIP LOCKED
)
DELETE FROM job_store.trigger_lanes AS l USING old
WHERE l.store_id = old.store_id AND l.trigger_id = old.trigger_id AND l.lane = old.lane
"""
# Logs of runs with events in the outbox are kept, because these events are read from the log when they are sent.
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
    WHERE e.store_id = p.store_id AND e.run_id = p.run_id AND e.last_seq < p.last_seq
), forgotten AS (
    DELETE FROM job_store.commands AS c USING part AS p WHERE c.store_id = p.store_id AND c.run_id = p.run_id
)
UPDATE job_store.runs AS r SET trimmed_seq = p.last_seq - 1 FROM part AS p
WHERE r.store_id = p.store_id AND r.run_id = p.run_id
"""
_TRIMMED_RUNS_MAX: Final = 100

_IS_SHOWN: Final = """EXISTS (
    SELECT FROM job_store.conversation_segments AS s
    WHERE s.store_id = {} AND s.source_conversation_id = {} AND s.last_number < {} AND s.first_number <= {}
)"""
# The age of the oldest row of each store. Hops from store to store through an index.
_AGES: Final = """
WITH RECURSIVE stores AS (
    (SELECT store_id, {time} AS oldest FROM job_store.{table} WHERE {which} ORDER BY store_id, {time} LIMIT 1)
    UNION ALL
    SELECT next.* FROM stores AS s CROSS JOIN LATERAL (
        SELECT t.store_id, t.{time} FROM job_store.{table} AS t WHERE {which} AND t.store_id > s.store_id
        ORDER BY t.store_id, t.{time} LIMIT 1
    ) AS next
)
SELECT store_id, extract(epoch FROM now() - oldest)::float8 AS seconds FROM stores
"""
_SUMMARY_AGES: Final = _AGES.format(table="messages", time="create_time", which="summarised_to > 0 AND NOT swept")
_CONVERSATION_AGES: Final = _AGES.format(table="conversations", time="update_time", which="active_run_id IS NULL")
# The oldest summary, unless a fork that ends before it shows the summarised messages, which is checked again under the
# lock. Its conversation is locked, as when conversations are removed. The owner's runs and forks still need the
# messages that a writer's summary covers, so such a summary is marked as swept immediately.
_OLD_SUMMARY: Final = f"""
SELECT m.store_id, m.conversation_id, m.number, m.summarised_to, m.create_time, c.user_id, m.user_id <> '' AS of_writer
FROM (
    SELECT * FROM job_store.messages
    WHERE store_id = $2 AND summarised_to > 0 AND NOT swept AND create_time < now() - make_interval(secs => $1)
    AND NOT {_IS_SHOWN.format("messages.store_id", "messages.conversation_id", "messages.number", "summarised_to")}
    ORDER BY create_time LIMIT 20
) AS m JOIN job_store.conversations AS c USING (store_id, conversation_id)
ORDER BY m.create_time LIMIT 1 FOR UPDATE OF c SKIP LOCKED
"""
_SHOWN: Final = f"SELECT {_IS_SHOWN.format('$1', '$2', '$3', '$4')}"
# Runs of the conversation's user, or hidden ones, that ended before the summary and have no message after its range.
_SUMMARISED_RUNS: Final = """
SELECT store_id, run_id FROM job_store.runs
WHERE store_id = $1 AND conversation_id = $2 AND create_time < $4 AND end_time < $4 AND user_id IN ('', $6)
AND run_id <> ALL (ARRAY(
    SELECT DISTINCT run_id FROM job_store.messages WHERE store_id = $1 AND conversation_id = $2 AND number > $3
))
ORDER BY create_time, run_id LIMIT $5
"""
# The other services need these ids when the conversation is erased.
_KEEP_IDS: Final = """
INSERT INTO job_store.erased_items
    (store_id, conversation_id, run_id, call_id, tool_name, effect_class, state, has_left)
SELECT $1, $2, run_id, call_id, '', 0, 0, false FROM (
    SELECT unnest($3::text[]) AS run_id, '' AS call_id
    UNION ALL SELECT run_id, call_id FROM job_store.calls WHERE store_id = $1 AND run_id = ANY ($3::text[])
) AS removed ON CONFLICT DO NOTHING
"""
_SUMMARISED_MESSAGES: Final = """
WITH gone AS (
    DELETE FROM job_store.messages WHERE store_id = $1 AND conversation_id = $2 AND number IN (
        SELECT number FROM job_store.messages
        WHERE store_id = $1 AND conversation_id = $2 AND number <= $3 AND run_id = ANY ($4)
        ORDER BY number LIMIT $5
    ) RETURNING number
), words AS (
    DELETE FROM job_store.conversation_words
    WHERE store_id = $1 AND conversation_id = $2 AND number IN (SELECT number FROM gone)
)
SELECT FROM gone
"""
_SWEPT: Final = """
UPDATE job_store.messages SET swept = true WHERE store_id = $1 AND conversation_id = $2 AND number = $3
"""

# A conversation that a fork shows is kept. This is checked again under the lock: a concurrent fork locks the
# conversation too.
_HAS_NO_FORK: Final = """NOT EXISTS (
    SELECT FROM job_store.conversation_segments AS s
    WHERE s.store_id = c.store_id AND s.source_conversation_id = c.conversation_id
)"""
# A conversation is in use while an open job reports to it.
_HAS_NO_JOB: Final = """NOT EXISTS (
    SELECT FROM job_store.runs AS j
    WHERE j.store_id = c.store_id AND j.reports_to = c.conversation_id AND j.reports_to <> '' AND j.state < 10
    OFFSET 0
)"""
_LOCK_OLD: Final = f"""
SELECT store_id, conversation_id FROM job_store.conversations AS c
WHERE store_id = $2 AND active_run_id IS NULL AND update_time < now() - make_interval(secs => $1)
AND {_HAS_NO_FORK} AND {_HAS_NO_JOB} AND erase_parts = '{{}}'
ORDER BY update_time LIMIT $3 FOR UPDATE SKIP LOCKED
"""
# The conversations have no user from now on, so that they can be removed in several transactions and cannot be used
# again. Their keys can be reused.
_OLD_CONVERSATIONS: Final = f"""
UPDATE job_store.conversations AS c SET user_id = '', key_hash = NULL
FROM unnest($1::text[], $2::text[]) AS k (store_id, conversation_id)
WHERE c.store_id = k.store_id AND c.conversation_id = k.conversation_id AND {_HAS_NO_FORK}
RETURNING c.store_id, c.conversation_id
"""
# The same for runs: no user can see a partly removed run, or undo a run again once the calls that undid it are removed.
_HIDDEN: Final = """
UPDATE job_store.runs AS t SET user_id = '' FROM unnest($1::text[], $2::text[]) AS k (store_id, run_id)
WHERE t.store_id = k.store_id AND t.run_id = k.run_id AND t.user_id <> ''
"""
_RUNS_OF: Final = """
SELECT r.store_id, r.run_id FROM unnest($1::text[], $2::text[]) AS k (store_id, conversation_id)
CROSS JOIN LATERAL (
    SELECT store_id, run_id FROM job_store.runs AS t
    WHERE t.store_id = k.store_id AND t.conversation_id = k.conversation_id LIMIT $3
) AS r
LIMIT $3
"""
# As everywhere, conversations are locked before runs, and both in key order. Otherwise two transactions could deadlock.
_REPORTED_TO: Final = f"""
SELECT {tables.CONVERSATIONS.names} FROM job_store.conversations AS c JOIN (
    SELECT DISTINCT r.store_id, r.reports_to || '' AS conversation_id FROM job_store.runs AS r
    JOIN unnest($1::text[], $2::text[]) AS k (store_id, run_id) USING (store_id, run_id)
) AS t USING (store_id, conversation_id) ORDER BY store_id, conversation_id FOR UPDATE OF c
"""
_LOCK_RUNS: Final = """
SELECT FROM job_store.runs AS r JOIN unnest($1::text[], $2::text[]) AS k (store_id, run_id) USING (store_id, run_id)
ORDER BY store_id, run_id FOR UPDATE OF r
"""


def _removal(table: str, owner: str, rest: str) -> str:
    return f"""
    DELETE FROM job_store.{table} AS t USING unnest($1::text[], $2::text[]) AS k (store_id, {owner})
    CROSS JOIN LATERAL (
        SELECT {rest} FROM job_store.{table} AS e WHERE e.store_id = k.store_id AND e.{owner} = k.{owner} LIMIT $3
    ) AS part
    WHERE t.store_id = k.store_id AND t.{owner} = k.{owner} AND t.{rest} = part.{rest}
    """


_OF_RUNS: Final = tuple(
    _removal(table, "run_id", rest)
    for table, rest in (("events", "last_seq"), ("commands", "command_id"), ("calls", "call_id"))
)
OF_CONVERSATIONS: Final = tuple(
    _removal(table, "conversation_id", "number") for table in ("conversation_words", "messages")
)
_RUNS: Final = """
DELETE FROM job_store.runs AS t USING unnest($1::text[], $2::text[]) AS k (store_id, run_id)
WHERE t.store_id = k.store_id AND t.run_id = k.run_id
"""
_EMPTY: Final = """
DELETE FROM job_store.conversations AS t USING unnest($1::text[], $2::text[]) AS k (store_id, conversation_id)
WHERE t.store_id = k.store_id AND t.conversation_id = k.conversation_id AND t.user_id = '' AND NOT EXISTS (
    SELECT FROM job_store.runs AS r WHERE r.store_id = t.store_id AND r.conversation_id = t.conversation_id
) AND NOT EXISTS (
    SELECT FROM job_store.messages AS m WHERE m.store_id = t.store_id AND m.conversation_id = t.conversation_id
)
"""
_RUNS_AT_ONCE_MAX: Final = 50
_CONVERSATIONS_AT_ONCE_MAX: Final = 20


class PostgresRetention(DatabaseAdapter):
    async def remove_requests(self, *, older_than_seconds: float, rows_max: int) -> int:
        return await deleted(self._database, _OLD_REQUESTS, older_than_seconds, rows_max)

    async def remove_keys(self, *, older_than_seconds: float, rows_max: int) -> int:
        return await deleted(self._database, _OLD_KEYS, older_than_seconds, rows_max)

    async def remove_key_events(self, *, rows_max: int) -> int:
        """Remove API key events older than 90 days. Return how many were removed."""
        count: int = await self._database.fetchval("SELECT job_store.remove_old_key_events($1)", rows_max)
        return count

    async def remove_usage(self, *, rows_max: int) -> int:
        """Remove usage older than 400 days, unused rates and expired model calls.

        Merge hourly usage older than 35 days. Return how many rows were merged or removed.
        """
        merged: int = await self._database.fetchval(_OLD_HOURS, HOURS_DAYS_MAX, rows_max)
        removed = await deleted(self._database, _OLD_USAGE, DAYS_MAX, rows_max)
        removed += await deleted(self._database, _OLD_TOKENS, DAYS_MAX, rows_max)
        removed += await deleted(self._database, _OLD_CALLS, rows_max)
        return merged + removed + await deleted(self._database, _OLD_RATES, rows_max)

    async def remove_trigger_events(self, *, older_than_seconds: float, rows_max: int) -> int:
        """Remove old trigger events and unused lanes. Return the number of rows removed."""
        removed = await deleted(self._database, _OLD_TRIGGER_EVENTS, older_than_seconds, rows_max)
        return removed + await deleted(self._database, _OLD_LANES, older_than_seconds, rows_max)

    async def remove_unsent(self, *, older_than_seconds: float, rows_max: int) -> int:
        """Drop life-cycle events that no stream has accepted within the given time. Return how many were dropped."""
        return await deleted(self._database, _OLD_UNSENT, older_than_seconds, rows_max)

    async def remove_sent(self, *, older_than_seconds: float, rows_max: int) -> int:
        """Remove life-cycle events that were sent at least this long ago. Return how many were removed."""
        return await deleted(self._database, _OLD_SENT, older_than_seconds, rows_max)

    async def trim_logs(self, *, older_than_seconds: float, events_max: int) -> int:
        """Trim the logs of runs that ended long ago. Return the number of runs trimmed.

        All commands and all events except the last are removed. Runs are trimmed one by one, oldest first, until about
        `events_max` events have been removed. Runs with unsent life-cycle events are skipped.
        """
        return await deleted(self._database, _TRIM, older_than_seconds, events_max, _TRIMMED_RUNS_MAX)

    async def summary_ages(self) -> Mapping[StoreId, float]:
        """Return the age in seconds of each store's oldest summary that covers runs which have not been removed."""
        return {row[0]: row[1] for row in await self._database.fetch(_SUMMARY_AGES)}

    async def conversation_ages(self) -> Mapping[StoreId, float]:
        """Return how many seconds each store's longest-inactive conversation has been inactive."""
        return {row[0]: row[1] for row in await self._database.fetch(_CONVERSATION_AGES)}

    async def remove_summarised(self, *, store_id: StoreId, older_than_seconds: float, rows_max: int) -> int:
        """From conversations that are still in use, remove a store's old runs that are covered by a summary.

        Return the approximate number of rows removed, or 0 when no more runs can be removed for now. Remove about
        `rows_max` rows of each kind. The runs had ended when the summary was written, and the model's history no longer
        needs their messages.
        """
        async with self._database.transaction() as connection:
            summary = await connection.fetchrow(_OLD_SUMMARY, older_than_seconds, store_id)
            if summary is None:
                return 0
            _, conversation_id, number, end, time, user_id, of_writer = summary
            if await connection.fetchval(_SHOWN, store_id, conversation_id, number, end):
                return 0
            which = (store_id, conversation_id, end, time, _RUNS_AT_ONCE_MAX, user_id)
            records = [] if of_writer else await connection.fetch(_SUMMARISED_RUNS, *which)
            if not records:
                return await deleted(connection, _SWEPT, store_id, conversation_id, number)
            runs = columns(records)
            await hide(connection, runs)
            await connection.execute(_KEEP_IDS, store_id, conversation_id, runs[1])
            removed = await deleted(connection, _SUMMARISED_MESSAGES, store_id, conversation_id, end, runs[1], rows_max)
            # A run is kept as long as any of its messages exists.
            return removed if removed == rows_max else removed + await remove_runs(connection, runs, rows_max=rows_max)

    async def remove_conversations(self, *, store_id: StoreId, older_than_seconds: float, rows_max: int) -> int:
        """Remove a store's conversations that have been idle for the given time, including all their data.

        Return the number of rows removed. Remove about `rows_max` rows of each kind. From the first batch on, the
        conversations can no longer be read by id.
        """
        async with self._database.transaction() as connection:
            locked = await connection.fetch(_LOCK_OLD, older_than_seconds, store_id, _CONVERSATIONS_AT_ONCE_MAX)
            records = await connection.fetch(_OLD_CONVERSATIONS, *columns(locked)) if locked else []
            if not records:
                return 0
            old = columns(records)
            runs = columns(await connection.fetch(_RUNS_OF, *old, _RUNS_AT_ONCE_MAX))
            await hide(connection, runs)
            removed = await remove_runs(connection, runs, rows_max=rows_max)
            for statement in OF_CONVERSATIONS:
                removed += await deleted(connection, statement, *old, _rows_per_owner(rows_max, old))
            return removed + await deleted(connection, _EMPTY, *old)


async def hide(connection: Connection, runs: Sequence[list[str]]) -> None:
    """Lock runs, detach them from their users, and drop their notices."""
    for record in await connection.fetch(_REPORTED_TO, *runs):
        row = tables.CONVERSATIONS.read(record)
        changed = replace(row, background=row.background.without(runs[1]))
        if changed != row:
            statement, arguments = joined([tables.CONVERSATIONS.update([(row, changed)])])
            await connection.execute(statement, *arguments)
    await connection.fetch(_LOCK_RUNS, *runs)
    await connection.execute(_HIDDEN, *runs)


async def remove_runs(connection: Connection, runs: Sequence[list[str]], *, rows_max: int) -> int:
    """Remove about `rows_max` rows of each kind that belong to these runs.

    When none are left, remove the runs themselves.
    """
    per_owner = _rows_per_owner(rows_max, runs)
    counts = [await deleted(connection, statement, *runs, per_owner) for statement in _OF_RUNS]
    if any(count >= per_owner for count in counts):
        return sum(counts)
    return sum(counts) + await deleted(connection, _RUNS, *runs)


async def deleted(database: Database | Connection, statement: str, *arguments: Any) -> int:
    return affected(await database.execute(statement, *arguments))


def _rows_per_owner(rows_max: int, owners: Sequence[list[str]]) -> int:
    return max(1, rows_max // max(1, len(owners[0])))


def columns(records: Sequence[Any]) -> tuple[list[str], list[str]]:
    return [record[0] for record in records], [record[1] for record in records]
