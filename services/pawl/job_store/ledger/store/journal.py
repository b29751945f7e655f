"""Applies groups of operations in PostgreSQL: locks and loads their rows, applies them, and writes the changes.

All code acquires locks in the same order: schedules, triggers, conversations, runs, each sorted by key. The lock on a
conversation covers its messages, and the lock on a run covers its calls, commands and events. See schema.sql.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import asyncpg

from pawl.chassis.ids import RunKey, StoreId
from pawl.chassis.process import logs
from pawl.errors import PawlError
from pawl.job_store.ledger.cache import RunCache
from pawl.job_store.ledger.ports import GroupConflict, Written
from pawl.job_store.ledger.rules import log, offers, steps, usage
from pawl.job_store.ledger.rules.steps import CachedRun
from pawl.job_store.ledger.rules.unit_of_work import Ids, Operation, UnitOfWork
from pawl.job_store.ledger.store import changes, upkeep
from pawl.job_store.ledger.store.changes import Changes
from pawl.job_store.ledger.store.loading import load
from pawl.server.db.database import Connection, Database
from pawl.values import Feature

# Another transaction committed first. A retry of the group sees its rows.
_CONFLICTS: Final = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.UniqueViolationError,
)

_ANY_WAITS: Final = f"SELECT {changes.ANY_WAITS.format(stores='$1')}"

_IS_SHARDED: Final = "SELECT coalesce(nullif(current_setting('pawl.sharded_by_store', true), ''), 'off')::boolean"

_log = logs.get_logger(__name__)


async def is_sharded(database: Database) -> bool:
    """Return whether the database is sharded by store, in which case no transaction should span stores."""
    return bool(await database.fetchval(_IS_SHARDED))


class PostgresJournal:
    """See `ports.Journal`. Without `keeps_lifecycle`, no life-cycle events are stored. See `UnitOfWork` for `off`."""

    def __init__(
        self,
        database: Database,
        ids: Ids,
        cache: RunCache,
        *,
        keeps_lifecycle: bool = True,
        off: Callable[[StoreId], Collection[Feature]] = lambda _: (),
    ) -> None:
        self._keeps_lifecycle = keeps_lifecycle
        self._off = off
        self._database = database
        self._ids = ids
        self._cache = cache

    async def write_steps(self, operations: Sequence[Operation[Any]]) -> Written:
        now = self._cache.now()
        outcomes: list[Any] = [None] * len(operations)
        if now is None or not (prepared := steps.prepare(operations, self._cache.get, now, self._ids)):
            return Written(outcomes=outcomes)
        parts = [Changes(step.unit, keeps_lifecycle=self._keeps_lifecycle) for step in prepared]
        statement, arguments = changes.of_steps(prepared, parts, now)
        for step in prepared:
            self._cache.drop(step.cached.key)
        try:
            (record,) = await self._database.fetch(statement, *arguments, urgent=True)
        except _CONFLICTS as error:
            raise GroupConflict from error
        self._cache.note_time(record["now"])
        numbers = frozenset(record["numbers"] or ())
        done = [(step, part) for step, part in zip(prepared, parts, strict=True) if step.number in numbers]
        for step, _ in done:
            outcomes[step.number] = step.outcome
            if (cached := step.written((record["version"], record["server_start"]))) is not None:
                self._cache.put(cached)
        return Written(
            outcomes=outcomes,
            events=[event for _, part in done for event in part.events],
            work_ready=record["any_waits"],
            lifecycle_count=sum(len(part.outbox) for _, part in done),
            inboxes={inbox for step, _ in done for inbox in offers.inboxes(step.unit)},
            conversations={each for step, _ in done for each in log.changed_conversations(step.unit)},
            ended_runs=[run for step, _ in done for run in usage.ended_runs(step.unit)],
            ended_calls=[call for step, _ in done for call in usage.ended_calls(step.unit)],
        )

    async def write(self, operations: Sequence[Operation[Any]]) -> Written:
        try:
            async with self._database.transaction(urgent=True) as connection:
                written, cached = await self._write(connection, operations)
        except _CONFLICTS as error:
            raise GroupConflict from error
        for key, run in cached.items():
            self._cache.drop(key)
            if run is not None:
                self._cache.put(run)
        return written

    async def _write(
        self, connection: Connection, operations: Sequence[Operation[Any]]
    ) -> tuple[Written, Mapping[RunKey, CachedRun | None]]:
        """Apply a group. Also return the part of each changed run that may be cached after the commit."""
        keys = [operation.row_keys for operation in operations]
        unit = await load(connection, self._ids, list(map(steps.loaded_with, keys)))
        unit.off = self._off
        self._cache.note_time(unit.now)
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
        changed = Changes(unit, keeps_lifecycle=self._keeps_lifecycle)
        version = await _store(connection, changed)
        written = Written(
            outcomes=outcomes,
            events=changed.events,
            wakeups=unit.wakeups.rows,
            work_ready=unit.work_ready or await _slot_is_needed(connection, unit),
            lifecycle_count=len(changed.outbox),
            inboxes=offers.inboxes(unit),
            conversations=log.changed_conversations(unit),
            started_runs=usage.started_runs(unit),
            ended_runs=usage.ended_runs(unit),
            ended_calls=usage.ended_calls(unit),
        )
        stepped = {key.step for key in keys}
        return written, {
            run.key: steps.after(unit, run.key, version, self._cache.get(run.key)) if run.key in stepped else None
            for _, run in unit.runs.changed()
        }


async def _slot_is_needed(connection: Connection, unit: UnitOfWork) -> bool:
    stores = {run.store_id for before, run in unit.runs.changed() if before.is_active and not run.is_active}
    return bool(stores) and bool(await connection.fetchval(_ANY_WAITS, sorted(stores)))


async def _store(connection: Connection, changed: Changes) -> Any:
    """Write all changes of the operations in one round trip, then remove trimmed rows.

    Return the version of the written rows, or None if there are none.
    """
    write = changes.of_group(changed)
    if write is None:
        return None
    statement, arguments = write
    (record,) = await connection.fetch(statement, *arguments)
    if trims := changed.unit.trims.rows:
        await upkeep.remove(connection, trims)
    return record["version"], record["server_start"]
