"""Steps that job-store writes with one statement, on the ledger in memory.

Assumption about PostgreSQL, besides those of the store: the statement finds all its rows as they are at one instant. It
writes all changes of each step whose rows are unchanged, and no change of other steps. The version of a run is its
row, which every write replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from pawl.chassis.ids import RunKey
from pawl.job_store.ledger.cache import RunCache
from pawl.job_store.ledger.ports import GroupConflict, LogRow, Operation, Written
from pawl.job_store.ledger.reading import Loaded
from pawl.job_store.ledger.rules import steps
from pawl.job_store.ledger.rules.prefix import HistoryPrefix
from pawl.job_store.ledger.rules.rows import ConversationKey
from pawl.job_store.ledger.rules.steps import Step
from tests.simulation.reads import MemoryReads
from tests.simulation.store import Database, MemoryJournal

# The columns of a conversation that steps read.
_READ = ("user_id", "active_run_id", "last_number", "title", "title_run_id", "queue", "background")


class StepJournal(MemoryJournal):
    async def write_steps(self, operations: Sequence[Operation[Any]]) -> Written:
        now = self.cache.now()
        prepared = steps.prepare(operations, self.cache.get, now, self._ids) if now is not None else []
        outcomes: list[Any] = [None] * len(operations)
        if not prepared:
            return Written(outcomes=outcomes)
        await self._database.reach(writes=True)
        calls = self._database.tables.calls
        # The cache has only open calls: a settled one is found by its key.
        exists = any(call.key in calls for step in prepared for call in step.unit.calls.created())
        if exists or self._database.conflicts():
            raise GroupConflict
        rows: list[LogRow] = []
        for step in prepared:
            self.cache.drop(step.cached.key)
            if self._is_current(step):
                rows += self._store_step(step)
                outcomes[step.number] = step.outcome
                if (cached := step.written(self._database.tables.runs[step.cached.key])) is not None:
                    self.cache.put(cached)
                self._tell(operations[step.number], step.outcome)
        self.cache.note_time(self._database.now())
        await self._database.answer()
        is_freed = any(step.frees_slot for step in prepared)
        return Written(outcomes=outcomes, events=rows, work_ready=is_freed)

    def _store_step(self, step: Step) -> list[LogRow]:
        """Store a step. Fields of its conversation that the step does not use may have changed."""
        conversations = self._database.tables.conversations
        run = step.cached.run
        key = ConversationKey(run.store_id, run.conversation_id)
        current = conversations[key]
        rows = self._store(step.unit)
        conversations[key] = current
        for _, after in step.conversations:
            asks = current.title_run_id != after.title_run_id
            conversations[key] = replace(
                current,
                active_run_id=after.active_run_id,
                last_number=after.last_number,
                title_at=after.title_at if asks else current.title_at,
                title_run_id=after.title_run_id,
                update_time=max(current.update_time, after.update_time),
            )
        return rows

    def _is_current(self, step: Step) -> bool:
        tables = self._database.tables
        for before, _ in step.conversations:
            now = tables.conversations[before.key]
            if any(getattr(now, name) != getattr(before, name) for name in _READ):
                return False
        return tables.runs.get(step.cached.key) is step.cached.version


class CachingReads(MemoryReads):
    def __init__(self, database: Database, cache: RunCache) -> None:
        super().__init__(database)
        self._cache = cache

    async def load(self, key: RunKey, epoch: int, known: HistoryPrefix | None = None) -> Loaded:
        loaded = await super().load(key, epoch, known)
        if not loaded.commands:
            conversation = self._tables.conversation_of(loaded.run)
            self._cache.put_loaded(loaded.run, conversation, loaded.calls, loaded.run)
        return loaded
