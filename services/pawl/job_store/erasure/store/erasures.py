"""Erases conversations from PostgreSQL in resumable steps.

The first step detaches the conversation from its user, as retention does. A transaction that has already read the
conversation notices this when it locks the row. Locks are taken in the same order as in the journal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from asyncpg import Record

from pawl.chassis.ids import ConversationId, RunId, RunKey, StoreId, UserId
from pawl.errors import ConversationNotFound
from pawl.event.v1 import call_pb2, conversation_pb2
from pawl.job_store.erasure.rules import (
    Erasure,
    ErasureKey,
    ItemPart,
    Part,
    has_left,
)
from pawl.job_store.erasure.store import retention
from pawl.job_store.ledger.reading import Page
from pawl.job_store.lifecycle import store as outbox
from pawl.server.db.database import Connection, DatabaseAdapter, affected
from pawl.values import CallState, RunState

# The statements are built only from constants in this module.
# ruff: noqa: S608

_MARKED: Final = """
user_id = '', key_hash = NULL, title = '', made_title = '', model_title = '', title_at = NULL, title_run_id = '',
labels = '', archived = false, erase_time = now(),
update_time = now(),
searched_title = '', searched_number = c.last_number, erase_user_id = c.user_id, erase_parts = $1,
past_number = 0, sharing = 1
"""
_ALL_PARTS: Final = list(Part)
_START: Final = f"""
UPDATE job_store.conversations AS c SET {_MARKED}, erase_root = c.conversation_id
WHERE store_id = $2 AND conversation_id = $3 AND user_id = $4 RETURNING c.store_id, c.conversation_id
"""
_RESTART: Final = f"""
UPDATE job_store.conversations AS c SET {_MARKED}, erase_root = c.conversation_id
FROM unnest($2::text[], $3::text[]) AS k (store_id, conversation_id)
WHERE c.store_id = k.store_id AND c.conversation_id = k.conversation_id AND c.user_id <> ''
RETURNING c.store_id, c.conversation_id
"""
# The conversations of agents that executed its calls are erased too.
_START_BELOW: Final = f"""
UPDATE job_store.conversations AS c SET {_MARKED}, erase_root = $4
WHERE store_id = $2 AND parent_conversation_id = $3 AND parent_conversation_id <> '' AND user_id <> ''
RETURNING c.store_id, c.conversation_id
"""
# Creating a fork locks all conversations that it shows, so it has either committed already or will find the title
# empty. Forks are found through segments, because `fork_of` does not lead past forks that retention has removed.
_TITLES_OF_SHOWING: Final = """
WITH showing AS MATERIALIZED (
    SELECT c.store_id, c.conversation_id FROM (
        SELECT DISTINCT s.store_id, s.conversation_id FROM job_store.conversation_segments AS s
        JOIN unnest($1::text[], $2::text[]) AS k (store_id, conversation_id)
        ON s.store_id = k.store_id AND s.source_conversation_id = k.conversation_id
    ) AS f JOIN job_store.conversations AS c USING (store_id, conversation_id)
    WHERE c.made_title <> ''
    ORDER BY c.store_id, c.conversation_id FOR UPDATE OF c
)
UPDATE job_store.conversations AS c SET made_title = '' FROM showing AS s
WHERE c.store_id = s.store_id AND c.conversation_id = s.conversation_id
"""
# Segments of forks that refer to the conversation lose their source, and its own segments are deleted.
_EMPTY_SEGMENTS: Final = """
UPDATE job_store.conversation_segments AS s SET source_conversation_id = ''
FROM unnest($1::text[], $2::text[]) AS k (store_id, conversation_id)
WHERE s.store_id = k.store_id AND s.source_conversation_id = k.conversation_id
"""
_REMOVE_SEGMENTS: Final = """
DELETE FROM job_store.conversation_segments AS s USING unnest($1::text[], $2::text[]) AS k (store_id, conversation_id)
WHERE s.store_id = k.store_id AND s.conversation_id = k.conversation_id
"""
# Forks inherit the title of their source, so it is erased there too.
_FORK_TITLES: Final = """
WITH RECURSIVE forks AS (
    SELECT conversation_id FROM job_store.conversations
    WHERE store_id = $1 AND user_id = $3 AND fork_of <> '' AND fork_of = $2
    UNION
    SELECT c.conversation_id FROM forks AS f CROSS JOIN LATERAL (
        SELECT conversation_id FROM job_store.conversations
        WHERE store_id = $1 AND user_id = $3 AND fork_of <> '' AND fork_of = f.conversation_id OFFSET 0
    ) AS c
)
UPDATE job_store.conversations AS c SET made_title = ''
FROM (SELECT DISTINCT $1::text AS store_id, conversation_id FROM forks) AS f
WHERE c.store_id = f.store_id AND c.conversation_id = f.conversation_id AND c.made_title <> ''
"""
# The conversation whose erasure includes this one. Only the user of that erasure finds it, because child conversations
# may belong to writers.
_ROOT: Final = """
SELECT k.erase_root FROM job_store.conversations AS k
WHERE k.store_id = $1 AND k.conversation_id = $2 AND k.erase_user_id <> '' AND $3 = coalesce((
    SELECT r.erase_user_id FROM job_store.conversations AS r
    WHERE r.store_id = k.store_id AND r.conversation_id = k.erase_root
), k.erase_user_id)
"""
_RECEIPT: Final = f"""
SELECT min(c.erase_time) AS erase_time, max(c.erase_end_time) AS end_time,
    array_agg(DISTINCT p.part) FILTER (WHERE p.part IS NOT NULL) AS parts
FROM job_store.conversations AS c LEFT JOIN LATERAL unnest(c.erase_parts) AS p (part) ON true
WHERE c.store_id = $1 AND c.erase_root <> '' AND c.erase_root = ({_ROOT})
"""
_LEFT: Final = f"""
SELECT i.run_id, i.call_id, i.tool_name, i.effect_class, i.state, i.start_time
FROM job_store.conversations AS c JOIN job_store.erased_items AS i USING (store_id, conversation_id)
WHERE c.store_id = $1 AND i.has_left AND (i.run_id, i.call_id) > ($4, $5)
AND c.erase_root <> '' AND c.erase_root = ({_ROOT})
ORDER BY i.run_id, i.call_id LIMIT $6
"""
_KEY: Final = "store_id, conversation_id, erase_user_id"
_OPEN: Final = f"""
SELECT {_KEY}, erase_time, erase_parts FROM job_store.conversations
WHERE erase_parts <> '{{}}' AND erase_parts && $1::text[] AND NOT erase_parts && $2::text[]
AND (erase_time, store_id, conversation_id) > (coalesce($3::timestamptz, '-infinity'), $4, $5)
ORDER BY erase_time, store_id, conversation_id LIMIT $6
"""
_OPEN_RUNS: Final = f"""
SELECT run_id, user_id FROM (
    SELECT run_id, user_id, state FROM job_store.runs WHERE store_id = $1 AND conversation_id = $2 OFFSET 0
) AS r
WHERE state < {RunState.COMPLETED.value} AND state <> ALL ($4::smallint[]) LIMIT $3
"""
_LOCK: Final = """
SELECT erase_root FROM job_store.conversations
WHERE store_id = $1 AND conversation_id = $2 AND $3 = ANY (erase_parts) FOR UPDATE
"""
_DONE: Final = """
UPDATE job_store.conversations SET erase_parts = array_remove(erase_parts, $3),
    erase_end_time = CASE WHEN erase_parts = ARRAY[$3]::text[] THEN coalesce(erase_end_time, now()) END
WHERE store_id = $1 AND conversation_id = $2 AND $3 = ANY (erase_parts)
RETURNING erase_parts = '{}'
"""
_FORGET_IDS: Final = """
DELETE FROM job_store.erased_items WHERE store_id = $1 AND conversation_id = $2 AND NOT has_left
"""
_RUNS: Final = """
SELECT store_id, run_id, user_id, trimmed_rounds FROM job_store.runs WHERE store_id = $1 AND conversation_id = $2
ORDER BY run_id LIMIT $3 FOR UPDATE
"""
# The request id is kept, but reveals nothing about the request.
_REQUESTS: Final = """
UPDATE job_store.requests SET fingerprint = ''
WHERE store_id = $1 AND user_id = ANY ($2::text[]) AND (run_id = ANY ($3::text[]) OR conversation_id = $4)
AND fingerprint <> ''
"""
_ADD_RUNS: Final = """
INSERT INTO job_store.erased_items
    (store_id, conversation_id, run_id, call_id, tool_name, effect_class, state, has_left)
SELECT $1, $2, run_id, '', '', 0, 0, false FROM unnest($3::text[]) AS k (run_id) ON CONFLICT DO NOTHING
"""
_CALLS: Final = """
SELECT run_id, call_id, tool_name, spec, state, start_time FROM job_store.calls
WHERE store_id = $1 AND run_id = ANY ($2::text[]) LIMIT $3
"""
_ADD_CALLS: Final = """
INSERT INTO job_store.erased_items
    (store_id, conversation_id, run_id, call_id, tool_name, effect_class, state, start_time, has_left)
SELECT $1, $2, * FROM unnest(
    $3::text[], $4::text[], $5::text[], $6::smallint[], $7::smallint[], $8::timestamptz[], $9::boolean[]
) ON CONFLICT DO NOTHING
"""
# A job's trimmed calls resembled its last one, so one item represents all of them.
_ADD_TRIMMED: Final = """
UPDATE job_store.erased_items AS i SET has_left = true, tool_name = last.tool_name,
    effect_class = last.effect_class, state = last.state
FROM (
    SELECT DISTINCT ON (run_id) * FROM job_store.erased_items
    WHERE store_id = $1 AND conversation_id = $2 AND run_id = ANY ($3::text[]) AND call_id <> '' AND has_left
    ORDER BY run_id, start_time DESC
) AS last
WHERE i.store_id = $1 AND i.conversation_id = $2 AND i.run_id = last.run_id AND i.call_id = '' AND NOT i.has_left
"""
_REMOVE_CALLS: Final = "DELETE FROM job_store.calls WHERE store_id = $1 AND call_id = ANY ($2::text[])"
# Nothing is left to index.
_EMPTIED: Final = """
UPDATE job_store.conversations SET searched_number = last_number WHERE store_id = $1 AND conversation_id = $2
"""
_ITEMS: Final = """
SELECT run_id, call_id FROM job_store.erased_items
WHERE store_id = $1 AND conversation_id = $2 AND (run_id, call_id) > ($3, $4) ORDER BY run_id, call_id LIMIT $5
"""
_LOG_AGAIN: Final = f"""
UPDATE job_store.conversations SET erase_parts = erase_parts || '{Part.LOG.value}'::text
WHERE erase_root <> '' AND NOT '{Part.LOG.value}' = ANY (erase_parts)
AND ($1::float8 IS NULL OR erase_time > now() - make_interval(secs => $1))
"""
_RUNS_AT_ONCE_MAX: Final = 50


class PostgresErasures(DatabaseAdapter):
    """Carries out erasures and stores their progress. Each step is durable on return and idempotent."""

    async def start(self, key: ErasureKey) -> None:
        """Start erasing a conversation. Has no effect if the conversation does not belong to the user."""
        async with self._database.transaction() as connection:
            await _mark(connection, _START, key.store_id, key.conversation_id, key.user_id)

    async def restart(self, conversations: Collection[tuple[StoreId, ConversationId]]) -> int:
        """Restart the erasure of conversations that have a user again, for example after a restore.

        Return how many were restarted.
        """
        stores, ids = [store_id for store_id, _ in conversations], [each for _, each in conversations]
        async with self._database.transaction() as connection:
            return await _mark(connection, _RESTART, stores, ids)

    async def log_again(self, *, younger_than_seconds: float | None) -> int:
        """Mark the LOG part of erasures as open again, so that their conversations are added to the list again.

        If `younger_than_seconds` is set, older erasures are not changed. Return how many were changed.
        """
        return affected(await self._database.execute(_LOG_AGAIN, younger_than_seconds))

    async def receipt(self, key: ErasureKey) -> conversation_pb2.Erasure:
        """Return the progress of an erasure.

        Raises:
            ConversationNotFound: The conversation was never erased, or did not belong to this user.
        """
        record = await self._database.fetchrow(_RECEIPT, key.store_id, key.conversation_id, key.user_id)
        if record is None or record["erase_time"] is None:
            raise ConversationNotFound
        parts = set(record["parts"] or ())
        return conversation_pb2.Erasure(
            conversation_id=key.conversation_id,
            erase_time=record["erase_time"],
            end_time=None if parts else record["end_time"],
            waits_for=[part.value for part in Part if part in parts],
        )

    async def left(self, key: ErasureKey, *, after: tuple[str, str], rows_max: int) -> Page[conversation_pb2.LeftCall]:
        """Return the calls whose data reached a tool or a client, ordered by run and call, starting after `after`."""
        arguments = (key.store_id, key.conversation_id, key.user_id, *after, rows_max + 1)
        records = await self._database.fetch(_LEFT, *arguments)
        rows = [conversation_pb2.LeftCall(**dict(record)) for record in records]
        return Page(rows=rows[:rows_max], has_more=len(rows) > rows_max)

    async def open(
        self, parts: Collection[Part], *, without: Collection[Part], after: Erasure | None, rows_max: int
    ) -> Sequence[Erasure]:
        """Return open erasures, oldest first, starting after `after`.

        Each still needs one of `parts` and none of `without`.
        """
        key_columns = (after.erase_time, after.key.store_id, after.key.conversation_id) if after else (None, "", "")
        arguments = (list(parts), list(without), *key_columns, rows_max)
        return [_erasure(record) for record in await self._database.fetch(_OPEN, *arguments)]

    async def open_runs(self, key: ErasureKey, *, runs_max: int) -> Sequence[tuple[RunKey, UserId]]:
        """Return the conversation's runs that have not ended and are not being stopped, with their users."""
        arguments = (key.store_id, key.conversation_id, runs_max, [RunState.CANCELLING])
        return [
            (RunKey(key.store_id, RunId(record["run_id"])), UserId(record["user_id"]))
            for record in await self._database.fetch(_OPEN_RUNS, *arguments)
        ]

    async def end_runs(self, key: ErasureKey) -> bool:
        """If no run is open, mark the RUNS part as complete, and start erasing the child conversations.

        Return whether RUNS is complete.
        """
        key_columns = (key.store_id, key.conversation_id)
        async with self._database.transaction() as connection:
            root = await connection.fetchval(_LOCK, *key_columns, Part.RUNS)
            if root is None or await connection.fetch(_OPEN_RUNS, *key_columns, 1, []):
                return False
            await _mark(connection, _START_BELOW, *key_columns, root)
            await _done(connection, key, Part.RUNS)
        return True

    async def remove(self, key: ErasureKey, *, rows_max: int) -> int:
        """Remove about `rows_max` rows of each kind from the ledger. Return the number of rows removed.

        When none are left, mark the LEDGER part as complete and return 0.
        """
        key_columns = (key.store_id, key.conversation_id)
        async with self._database.transaction() as connection:
            if await connection.fetchval(_LOCK, *key_columns, Part.LEDGER) is None:
                return 0
            records = await connection.fetch(_RUNS, *key_columns, _RUNS_AT_ONCE_MAX)
            removed = await self._remove_runs(connection, key, records, rows_max=rows_max) if records else 0
            if removed:
                return removed
            for statement in retention.OF_CONVERSATIONS:
                removed += await retention.deleted(connection, statement, [key_columns[0]], [key_columns[1]], rows_max)
            if not removed:
                await connection.execute(_REQUESTS, key.store_id, [key.user_id], [], key.conversation_id)
                await connection.execute(_EMPTIED, *key_columns)
                await connection.execute(_FORK_TITLES, *key_columns, key.user_id)
                await _done(connection, key, Part.LEDGER)
        return removed

    async def _remove_runs(
        self, connection: Connection, key: ErasureKey, records: Sequence[Record], *, rows_max: int
    ) -> int:
        runs = retention.columns(records)
        users = {key.user_id, *(record["user_id"] for record in records)} - {""}
        await connection.execute(_REQUESTS, key.store_id, list(users), runs[1], key.conversation_id)
        await retention.hide(connection, runs)
        await outbox.keep_relay_out(connection)
        await connection.execute(_ADD_RUNS, key.store_id, key.conversation_id, runs[1])
        calls = await connection.fetch(_CALLS, key.store_id, runs[1], rows_max)
        if calls:
            await connection.execute(
                _ADD_CALLS, key.store_id, key.conversation_id, *map(list, zip(*map(_item, calls), strict=True))
            )
            trimmed = [record["run_id"] for record in records if record["trimmed_rounds"]]
            await connection.execute(_ADD_TRIMMED, key.store_id, key.conversation_id, trimmed)
            await connection.execute(_REMOVE_CALLS, key.store_id, [call["call_id"] for call in calls])
            return len(calls)
        return await retention.remove_runs(connection, runs, rows_max=rows_max)

    async def done(self, key: ErasureKey, part: Part) -> None:
        async with self._database.transaction() as connection:
            await _done(connection, key, part)

    async def items(self, key: ErasureKey, *, after: tuple[str, str], items_max: int) -> ItemPart:
        """Return the ids of an erased conversation's runs and calls, in order, starting after `after`."""
        records = await self._database.fetch(_ITEMS, key.store_id, key.conversation_id, *after, items_max + 1)
        taken = records[:items_max]
        return ItemPart(
            run_ids=[record["run_id"] for record in taken if not record["call_id"]],
            call_ids=[record["call_id"] for record in taken if record["call_id"]],
            last=(taken[-1]["run_id"], taken[-1]["call_id"]) if taken else after,
            has_more=len(records) > items_max,
        )


def _item(call: Record) -> tuple[Any, ...]:
    """Return the data to keep about a call. It includes the tool's name only if the call reached a tool or a client."""
    spec = call_pb2.Call.FromString(call["spec"])
    # Imported calls ran elsewhere.
    context, effect_class = (0, 0) if spec.imported else (spec.context, spec.effect_class)
    left = has_left(CallState(call["state"]), context=context, has_started=call["start_time"] is not None)
    tool_name = call["tool_name"].decode() if left else ""
    return call["run_id"], call["call_id"], tool_name, effect_class, call["state"], call["start_time"], left


async def _mark(connection: Connection, statement: str, *arguments: Any) -> int:
    marked = retention.columns(await connection.fetch(statement, _ALL_PARTS, *arguments))
    for each in (_TITLES_OF_SHOWING, _EMPTY_SEGMENTS, _REMOVE_SEGMENTS):
        await connection.execute(each, *marked)
    return len(marked[0])


async def _done(connection: Connection, key: ErasureKey, part: Part) -> None:
    if await connection.fetchval(_DONE, key.store_id, key.conversation_id, part):
        await connection.execute(_FORGET_IDS, key.store_id, key.conversation_id)


def _erasure(record: Record) -> Erasure:
    key = ErasureKey(
        store_id=record["store_id"], conversation_id=record["conversation_id"], user_id=record["erase_user_id"]
    )
    return Erasure(key=key, erase_time=record["erase_time"], parts=tuple(map(Part, record["erase_parts"])))
