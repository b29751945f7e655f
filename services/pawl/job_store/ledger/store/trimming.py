"""Removing older iterations of open jobs, in the transaction that says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pawl.chassis.db.database import Connection
from pawl.job_store.ledger.rules.trimming import Trim
from pawl.values import CallState

# Together with what was decided about them, and what told of the ends of runs that had done them. Failures are counted.
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
# Those that are still to be sent stay until the next time. Nobody reads them meanwhile.
_EVENTS: Final = """
DELETE FROM job_store.events AS e USING unnest($1::text[], $2::text[], $3::bigint[]) AS k (store_id, run_id, seq)
WHERE e.store_id = k.store_id AND e.run_id = k.run_id AND e.seq <= k.seq AND NOT EXISTS (
    SELECT FROM job_store.outbox AS o WHERE o.store_id = e.store_id AND o.run_id = e.run_id AND o.seq = e.seq
)
"""


async def remove(connection: Connection, trims: Sequence[Trim]) -> None:
    """Remove what is trimmed; the runs are locked."""
    stores, runs = [trim.run.store_id for trim in trims], [trim.run.run_id for trim in trims]
    await connection.execute(_CALLS, stores, runs, [trim.round for trim in trims], CallState.SUCCEEDED)
    await connection.execute(_EVENTS, stores, runs, [trim.seq for trim in trims])
