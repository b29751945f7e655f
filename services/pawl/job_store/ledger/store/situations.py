"""Reads from PostgreSQL why runs are not making progress. Two statements are enough for any number of runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from asyncpg import Record

from pawl.chassis.ids import RunId, RunKey, StoreId
from pawl.errors import RunNotFound
from pawl.job_store.ledger.reading import OPEN_CALLS_MAX, Page, RunView
from pawl.job_store.ledger.rules.offers import is_pending
from pawl.job_store.ledger.rules.rows import CallRow, RunRow
from pawl.job_store.ledger.rules.waiting import COUNTED_MAX, Situation
from pawl.job_store.ledger.store import run_lists, tables
from pawl.server.db.database import Connection, DatabaseAdapter
from pawl.values import CallState, RunState

# The statements are built only from constants in this package.
# ruff: noqa: S608

_NEEDS_SLOT: Final = "r.state = 1 AND r.queued_message IS NULL AND NOT r.active AND NOT r.in_background"
# The used slots are counted once, and only if one of the runs is waiting for a slot.
_AROUND: Final = f"""
WITH taken AS MATERIALIZED (
    SELECT user_id, count(*) AS runs FROM job_store.runs WHERE store_id = $1 AND active AND NOT in_background
    GROUP BY user_id
)
SELECT r.run_id, now() AS time, counted.states, counted.counts, counted.child_run_ids, c.active_run_id, c.queue,
    CASE WHEN {_NEEDS_SLOT} THEN (SELECT sum(runs)::bigint FROM taken) END AS store_slots_used,
    CASE WHEN {_NEEDS_SLOT} THEN (SELECT runs FROM taken WHERE taken.user_id = r.user_id) END AS user_slots_used
FROM job_store.runs AS r
CROSS JOIN LATERAL (
    SELECT array_agg(g.state ORDER BY g.state) AS states, array_agg(g.calls ORDER BY g.state) AS counts,
        string_agg(g.child_run_ids, ',') AS child_run_ids
    FROM (
        SELECT newest.state, count(*) AS calls,
            string_agg(newest.child_run_id, ',') FILTER (WHERE newest.child_run_id <> '') AS child_run_ids
        FROM (
            SELECT n.state, n.child_run_id FROM job_store.calls AS n
            WHERE n.store_id = r.store_id AND n.run_id = r.run_id
            ORDER BY n.round DESC, n.batch_index DESC, n.call_id DESC LIMIT {COUNTED_MAX}
        ) AS newest GROUP BY newest.state
    ) AS g
) AS counted
LEFT JOIN LATERAL (
    SELECT active_run_id, queue FROM job_store.conversations
    WHERE store_id = r.store_id AND conversation_id = r.conversation_id OFFSET 0
) AS c ON r.state = 1 AND r.queued_message IS NOT NULL
WHERE r.store_id = $1 AND r.run_id = ANY ($2::text[])
"""
_WITHOUT_CONTENT: Final = tables.CALLS.names.replace(
    " arguments, result, spec,", " ''::bytea AS arguments, NULL::bytea AS result, ''::bytea AS spec,"
)
_FIRST_OPEN_CALLS: Final = f"""
SELECT {_WITHOUT_CONTENT} FROM unnest($2::text[]) AS k (id)
CROSS JOIN LATERAL (
    SELECT * FROM job_store.calls AS each
    WHERE each.store_id = $1 AND each.run_id = k.id AND each.state < 10 AND each.state IN (2, 3, 4, 6, 7)
    ORDER BY each.round, each.batch_index LIMIT {OPEN_CALLS_MAX}
) AS c
ORDER BY run_id, round, batch_index
"""
_WAITING_STATES: Final = frozenset({RunState.WAITING, RunState.NEEDS_ATTENTION})


async def of_page(connection: Connection, store_id: StoreId, runs: Sequence[RunRow]) -> list[Situation]:
    """Return the situations of some of a store's runs, each with its first calls that are waiting for someone."""
    wanted = [run.run_id for run in runs if run.state in _WAITING_STATES]
    calls: dict[str, list[CallRow]] = {run.run_id: [] for run in runs}
    if wanted:
        for record in await connection.fetch(_FIRST_OPEN_CALLS, store_id, wanted):
            calls[record["run_id"]].append(tables.CALLS.read(record))
    return await of_runs(connection, store_id, [(run, calls[run.run_id]) for run in runs], calls_max=OPEN_CALLS_MAX)


async def of_runs(
    connection: Connection,
    store_id: StoreId,
    runs: Sequence[tuple[RunRow, Sequence[CallRow]]],
    *,
    calls_max: int | None = None,
) -> list[Situation]:
    """Return the situations of some of a store's runs, each with at most `calls_max` of its open calls."""
    if not runs:
        return []
    records = await connection.fetch(_AROUND, store_id, [run.run_id for run, _ in runs])
    around = {record["run_id"]: record for record in records}
    return [
        Situation(run=run, calls=calls, is_cut=len(calls) == calls_max, **_facts(run, around[run.run_id]))
        for run, calls in runs
    ]


def _facts(run: RunRow, record: Record) -> dict[str, Any]:
    return {
        "time": record["time"],
        "call_counts": tuple(
            (CallState(state), count)
            for state, count in zip(record["states"] or (), record["counts"] or (), strict=True)
        ),
        # Ids sort by creation time.
        "child_run_ids": tuple(sorted(map(RunId, filter(None, (record["child_run_ids"] or "").split(","))))),
        "before": _before(run, record),
        "store_slots_used": record["store_slots_used"] or 0,
        "user_slots_used": record["user_slots_used"] or 0,
    }


def _before(run: RunRow, record: Record) -> tuple[RunId, ...]:
    queue = (record["queue"] or "").split(",")
    if run.run_id not in queue:
        return ()
    return tuple(map(RunId, filter(None, (record["active_run_id"], *queue[: queue.index(run.run_id)]))))


# The statements are built only from constants in this package.
# ruff: noqa: S608

_DOOMED: Final = """
SELECT store_id, run_id FROM job_store.runs
WHERE claim_at <= now() AND crashes > 0 AND worker_id IS NOT NULL AND crashes + 1 >= $1
ORDER BY claim_at LIMIT $2
"""
_CALL_BYTES: Final = "length(c.spec) + length(c.arguments)"
_LISTED: Final = run_lists.statement(
    tables.RUNS,
    where="""store_id = $3 AND attention IS NOT NULL AND ($4 = '' OR run_id = $4)
        AND (attention_time, run_id) > (coalesce($5::timestamptz, '-infinity'), $6)""",
    order="attention_time, run_id",
    size=f"""{tables.RUN_BYTES} + coalesce((
        SELECT sum({_CALL_BYTES}) FROM job_store.calls AS c
        WHERE c.store_id = t.store_id AND c.run_id = t.run_id AND c.state = 6
    ), 0)""",
)
_KNOWN: Final = "SELECT FROM job_store.runs WHERE store_id = $1 AND run_id = $2"
# The running calls, whose outcomes may be in doubt. Returns the first call of each run, and more up to the size limit.
_RUNNING: Final = f"""
SELECT {tables.CALLS.names} FROM (
    SELECT c.*, sum({_CALL_BYTES}) OVER (ORDER BY c.run_id, c.round, c.batch_index) AS bytes_so_far,
           row_number() OVER (PARTITION BY c.run_id ORDER BY c.round, c.batch_index) AS place
    FROM job_store.calls AS c
    WHERE c.store_id = $1 AND c.run_id = ANY ($2::text[]) AND c.state = 6
) AS c WHERE place = 1 OR bytes_so_far <= $3 ORDER BY run_id, round, batch_index
"""


class PostgresAttentionRepository(DatabaseAdapter):
    async def doomed(self, *, crashes_max: int, runs_max: int) -> tuple[RunKey, ...]:
        records = await self._database.fetch(_DOOMED, crashes_max, runs_max)
        return tuple(RunKey(record["store_id"], record["run_id"]) for record in records)

    async def listed(
        self, store_id: StoreId, *, run_id: RunId, after: tuple[datetime, str] | None, rows_max: int
    ) -> Page[RunView]:
        arguments = (store_id, run_id, *(after or (None, "")))
        async with self._database.snapshot() as connection:
            page = await run_lists.fetch(connection, _LISTED, arguments, tables.RUNS.read, rows_max=rows_max)
            run_ids = [run.run_id for run in page.rows]
            if run_id and not run_ids and await connection.fetchrow(_KNOWN, store_id, run_id) is None:
                raise RunNotFound
            records = await connection.fetch(_RUNNING, store_id, run_ids, run_lists.PAGE_BYTES_MAX) if run_ids else []
        calls: dict[str, list[CallRow]] = {run_id: [] for run_id in run_ids}
        for call in map(tables.CALLS.read, records):
            calls[call.run_id].append(call)
        views = [
            RunView(run=run, pending=tuple(call for call in calls[run.run_id] if is_pending(run, call)))
            for run in page.rows
        ]
        return Page(rows=views, has_more=page.has_more)
