"""Runs that need an operator, or are about to, on PostgreSQL."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from pawl.chassis.db.database import DatabaseAdapter
from pawl.chassis.ids import RunId, RunKey, StoreId
from pawl.errors import RunNotFound
from pawl.job_store.ledger.reading import Page, RunView
from pawl.job_store.ledger.rules.offers import is_pending
from pawl.job_store.ledger.rules.rows import CallRow
from pawl.job_store.ledger.store import paging, tables

# The statements are made from constants of this package only.
# ruff: noqa: S608

_DOOMED: Final = """
SELECT store_id, run_id FROM job_store.runs
WHERE claim_at <= now() AND crashes > 0 AND worker_id IS NOT NULL AND crashes + 1 >= $1
ORDER BY claim_at LIMIT $2
"""
_CALL_BYTES: Final = "length(c.spec) + length(c.arguments)"
_LISTED: Final = paging.statement(
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
# Calls that run: those of runs in doubt are the doubtful ones. The first of each run, and as many more as go.
_RUNNING: Final = f"""
SELECT {tables.CALLS.names} FROM (
    SELECT c.*, sum({_CALL_BYTES}) OVER (ORDER BY c.run_id, c.round, c.batch_index) AS bytes_so_far,
           row_number() OVER (PARTITION BY c.run_id ORDER BY c.round, c.batch_index) AS place
    FROM job_store.calls AS c
    WHERE c.store_id = $1 AND c.run_id = ANY ($2::text[]) AND c.state = 6
) AS c WHERE place = 1 OR bytes_so_far <= $3 ORDER BY run_id, round, batch_index
"""


class PostgresAttentionRepository(DatabaseAdapter):
    """See `ports.AttentionRepository`."""

    async def doomed(self, *, crashes_max: int, runs_max: int) -> tuple[RunKey, ...]:
        records = await self._database.fetch(_DOOMED, crashes_max, runs_max)
        return tuple(RunKey(record["store_id"], record["run_id"]) for record in records)

    async def listed(
        self, store_id: StoreId, *, run_id: RunId, after: tuple[datetime, str] | None, rows_max: int
    ) -> Page[RunView]:
        arguments = (store_id, run_id, *(after or (None, "")))
        async with self._database.snapshot() as connection:
            page = await paging.fetch(connection, _LISTED, arguments, tables.RUNS.read, rows_max=rows_max)
            run_ids = [run.run_id for run in page.rows]
            if run_id and not run_ids and await connection.fetchrow(_KNOWN, store_id, run_id) is None:
                raise RunNotFound
            records = await connection.fetch(_RUNNING, store_id, run_ids, paging.PAGE_BYTES_MAX) if run_ids else []
        calls: dict[str, list[CallRow]] = {run_id: [] for run_id in run_ids}
        for call in map(tables.CALLS.read, records):
            calls[call.run_id].append(call)
        views = [
            RunView(run=run, pending=tuple(call for call in calls[run.run_id] if is_pending(run, call)))
            for run in page.rows
        ]
        return Page(rows=views, has_more=page.has_more)
