"""In-memory reads of the runs that need an operator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TypeVar

from pawl.chassis.ids import RunId, RunKey, StoreId
from pawl.errors import RunNotFound
from pawl.job_store.ledger.reading import Page, RunView
from pawl.job_store.ledger.rules.offers import is_pending
from pawl.job_store.ledger.rules.rows import CallRow, RunRow
from pawl.values import CallState
from tests.simulation.store import Database

R = TypeVar("R")


def page(rows: Sequence[R], rows_max: int) -> Page[R]:
    return Page(rows=rows[:rows_max], has_more=len(rows) > rows_max)


def crashes(row: RunRow) -> int:
    """Return how many workers died with this due run, including its current worker if it has one."""
    return row.crashes + (row.worker_id is not None)


class MemoryAttentionRepository:
    """In-memory `ports.AttentionRepository`. Pages are limited by row count only."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def doomed(self, *, crashes_max: int, runs_max: int) -> tuple[RunKey, ...]:
        await self._database.reach()
        now = self._database.now()
        doomed = [
            (row.claim_at, row.key)
            for row in self._database.tables.runs.values()
            if row.worker_id is not None
            and row.claim_at is not None
            and row.claim_at <= now
            and crashes(row) >= crashes_max
        ]
        return tuple(key for _, key in sorted(doomed)[:runs_max])

    async def listed(
        self, store_id: StoreId, *, run_id: RunId, after: tuple[datetime, str] | None, rows_max: int
    ) -> Page[RunView]:
        await self._database.reach()
        tables = self._database.tables
        rows = [
            ((row.attention.since_time, row.run_id), row)
            for row in tables.runs.values()
            if row.attention is not None and row.store_id == store_id and run_id in {"", row.run_id}
        ]
        if run_id and RunKey(store_id, run_id) not in tables.runs:
            raise RunNotFound

        def running(row: RunRow) -> list[CallRow]:
            return [call for call in tables.calls_of(row.key) if call.state is CallState.RUNNING]

        views = [
            RunView(run=row, pending=tuple(call for call in running(row) if is_pending(row, call)))
            for position, row in sorted(rows, key=lambda pair: pair[0])
            if after is None or position > after
        ]
        return page(views, rows_max)
