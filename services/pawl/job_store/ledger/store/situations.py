"""The situations of runs on PostgreSQL: what tells why they do not go on, for many runs in two statements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from asyncpg import Record

from pawl.chassis.db.database import Connection
from pawl.chassis.ids import RunId, StoreId
from pawl.job_store.ledger.reading import OPEN_CALLS_MAX
from pawl.job_store.ledger.rules.rows import CallRow, RunRow
from pawl.job_store.ledger.rules.waiting import COUNTED_MAX, Situation
from pawl.job_store.ledger.store import tables
from pawl.values import CallState, RunState

# The statements are made from constants of this package only.
# ruff: noqa: S608

_WANTS_A_PLACE: Final = "r.state = 1 AND r.queued_message IS NULL AND NOT r.active AND NOT r.in_background"
# The places that are taken are counted only if one of the runs wants one, and then once.
_AROUND: Final = f"""
WITH taken AS MATERIALIZED (
    SELECT user_id, count(*) AS runs FROM job_store.runs WHERE store_id = $1 AND active AND NOT in_background
    GROUP BY user_id
)
SELECT r.run_id, now() AS time, counted.states, counted.counts, counted.child_run_ids, c.active_run_id, c.queue,
    CASE WHEN {_WANTS_A_PLACE} THEN (SELECT sum(runs)::bigint FROM taken) END AS store_taken,
    CASE WHEN {_WANTS_A_PLACE} THEN (SELECT runs FROM taken WHERE taken.user_id = r.user_id) END AS user_taken
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
_WAIT_FOR_SOMEBODY: Final = frozenset({RunState.WAITING, RunState.NEEDS_ATTENTION})


async def of_page(connection: Connection, store_id: StoreId, runs: Sequence[RunRow]) -> list[Situation]:
    """Return the situations of some runs of a store, each with the first calls that wait for somebody."""
    wanted = [run.run_id for run in runs if run.state in _WAIT_FOR_SOMEBODY]
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
    """Return the situations of some runs of a store with their open calls, which are cut if they are `calls_max`."""
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
        # Ids sort by the time at which they were made.
        "child_run_ids": tuple(sorted(map(RunId, filter(None, (record["child_run_ids"] or "").split(","))))),
        "before": _before(run, record),
        "store_taken": record["store_taken"] or 0,
        "user_taken": record["user_taken"] or 0,
    }


def _before(run: RunRow, record: Record) -> tuple[RunId, ...]:
    queue = (record["queue"] or "").split(",")
    if run.run_id not in queue:
        return ()
    return tuple(map(RunId, filter(None, (record["active_run_id"], *queue[: queue.index(run.run_id)]))))
