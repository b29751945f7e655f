"""Applies groups of operations in PostgreSQL: lock and load their rows, apply them, write the changes, commit.

All code takes locks in the same order: schedules, triggers, conversations, runs, each sorted by key. The lock on a
conversation covers its messages, and the lock on a run covers its calls, commands and events. See schema.sql.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import asyncpg

from pawl.chassis.db.database import Connection, Database
from pawl.chassis.process import logs
from pawl.errors import PawlError
from pawl.job_store.ledger.ports import GroupConflict, LogRow, Operation, Written
from pawl.job_store.ledger.rpc import log_rows
from pawl.job_store.ledger.rpc.events import encode_event
from pawl.job_store.ledger.rpc.messages import usage_of
from pawl.job_store.ledger.rules import offers
from pawl.job_store.ledger.rules.events import Event
from pawl.job_store.ledger.rules.unit_of_work import Ids, UnitOfWork
from pawl.job_store.ledger.rules.usage import added
from pawl.job_store.ledger.store import tables, upkeep
from pawl.job_store.ledger.store.columns import Columns, Write, joined
from pawl.job_store.ledger.store.loading import load

R = TypeVar("R")

# Another transaction came first: a retry of the group sees its rows.
_CONFLICTS: Final = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.UniqueViolationError,
)

_ANY_WAITS: Final = """
SELECT EXISTS (
    SELECT FROM unnest($1::text[]) AS k (store_id) CROSS JOIN LATERAL (
        SELECT FROM job_store.runs AS r WHERE r.store_id = k.store_id AND r.claim_at <= now() AND NOT r.active LIMIT 1
    ) AS waiting
)
"""

_log = logs.get_logger(__name__)


class PostgresJournal:
    """See `ports.Journal`. Without `keeps_lifecycle`, no life-cycle events are stored for sending."""

    def __init__(self, database: Database, ids: Ids, *, keeps_lifecycle: bool = True) -> None:
        self._keeps_lifecycle = keeps_lifecycle
        self._database = database
        self._ids = ids

    async def write(self, operations: Sequence[Operation[Any]]) -> Written:
        try:
            async with self._database.transaction(urgent=True) as connection:
                return await self._write(connection, operations)
        except _CONFLICTS as error:
            raise GroupConflict from error

    async def _write(self, connection: Connection, operations: Sequence[Operation[Any]]) -> Written:
        unit = await load(connection, self._ids, [operation.row_keys for operation in operations])
        outcomes: list[Any] = []
        for operation in operations:
            try:
                with unit.attempt():
                    outcomes.append(operation.apply(unit))
            except PawlError as error:
                outcomes.append(error)
            except Exception as error:  # noqa: BLE001  # it changed nothing and must not affect the others
                _log.exception("ledger.operation_failed", operation=type(operation).__name__)
                outcomes.append(error)
        events = log_rows.pack((event, encode_event(event)) for event in unit.events.rows)
        outbox: list[tuple[Event, bytes | None]] = []
        if self._keeps_lifecycle:
            outbox += [(event, None) for event in unit.events.rows if event.lifecycle_type]
            # The outbox stores the bytes of events that are in no log.
            outbox += [(event, encode_event(event)) for event in unit.off_log.rows]
        await _store(connection, unit, events, outbox)
        work_ready = unit.work_ready or await _slot_is_needed(connection, unit)
        return Written(
            outcomes=outcomes,
            events=events,
            wakeups=unit.wakeups.rows,
            work_ready=work_ready,
            lifecycle_count=len(outbox),
            inboxes=offers.inboxes(unit),
        )


async def _slot_is_needed(connection: Connection, unit: UnitOfWork) -> bool:
    stores = {run.store_id for before, run in unit.runs.changed() if before.is_active and not run.is_active}
    return bool(stores) and bool(await connection.fetchval(_ANY_WAITS, sorted(stores)))


async def _store(
    connection: Connection,
    unit: UnitOfWork,
    events: Sequence[LogRow],
    outbox: Sequence[tuple[Event, bytes | None]],
) -> None:
    """Write all changes of the operations in one round trip, then remove trimmed rows."""
    # Sorted, so that two groups that create the same rows wait for each other instead of deadlocking.
    requests = sorted(unit.requests.created(), key=lambda row: row.key)
    # By client key first, because other groups may create conversations with the same keys.
    conversations = sorted(unit.conversations.created(), key=lambda row: (row.key_hash or b"", row.key))
    new_runs, runs = unit.runs.created(), unit.runs.changed()
    counts = added(new_runs, runs, usage_of, unit.now)
    writes = [
        *_created(tables.REQUESTS, requests),
        *_created(tables.CONVERSATIONS, conversations),
        *_changed(tables.CONVERSATIONS, unit.conversations.changed()),
        *_created(tables.SEGMENTS, unit.segments.rows),
        *_created(tables.RUNS, new_runs, [unit.loop_states.get(run.key) for run in new_runs]),
        *_changed(tables.RUNS, runs, [unit.loop_states.get(run.key) for _, run in runs]),
        *_created(tables.MESSAGES, unit.messages.rows),
        *_created(tables.CALLS, unit.calls.created()),
        *_changed(tables.CALLS, unit.calls.changed()),
        *_created(tables.COMMANDS, unit.commands.created()),
        *_changed(tables.COMMANDS, unit.commands.changed()),
        *_changed(tables.SCHEDULES, unit.schedules.changed()),
        *_changed(tables.TRIGGERS, unit.triggers.changed()),
        *_created(tables.TRIGGER_EVENTS, unit.trigger_events.created()),
        *_changed(tables.TRIGGER_EVENTS, unit.trigger_events.changed()),
        *_created(tables.LANES, unit.lanes.created()),
        *_changed(tables.LANES, unit.lanes.changed()),
        *_created(tables.EVENTS, events),
        *_created(tables.OUTBOX, [event for event, _ in outbox], [payload for _, payload in outbox]),
        *([upkeep.addition(counts)] if counts else []),
    ]
    if writes:
        statement, arguments = joined(writes)
        await connection.execute(statement, *arguments)
    if unit.trims.rows:
        await upkeep.remove(connection, unit.trims.rows)


def _created(columns: Columns[R], rows: Sequence[R], beside: Sequence[Any] | None = None) -> list[Write]:
    return [columns.insert(rows, beside)] if rows else []


def _changed(columns: Columns[R], rows: Sequence[tuple[R, R]], beside: Sequence[Any] | None = None) -> list[Write]:
    return [columns.update(rows, beside)] if rows else []
