"""In-memory reads of what has changed in conversations."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from pawl.chassis.ids import RunId, RunKey, UserId
from pawl.job_store.ledger.reading import ChangedRuns
from pawl.job_store.ledger.rules.rows import ConversationKey, ConversationRow, RunRow
from pawl.values import CallState, RunState
from tests.simulation.store import Database


class MemoryChanges:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._tables = database.tables

    async def loop_state(self, key: RunKey) -> bytes:
        return self._tables.loop_states.get(key, b"")

    async def changed_runs(
        self, conversation: ConversationRow, user_id: UserId, *, since: datetime | None, all_open: bool
    ) -> ChangedRuns:
        await self._database.reach()
        named = {conversation.conversation_id}
        found: dict[RunId, RunRow] = {}
        while True:
            more = {
                run.run_id: run
                for run in self._tables.runs.values()
                if run.store_id == conversation.store_id and run.user_id == user_id and not run.imported
                if named & {run.conversation_id, run.reports_to} or run.parent_run_id in found
                if not run.state.is_terminal or (since is not None and run.update_time >= since)
            }
            if more.keys() <= found.keys():
                break
            found |= more
        is_open = [run for run in found.values() if not run.state.is_terminal]
        rows = sorted(found.values(), key=lambda run: (run.create_time, run.run_id))
        return ChangedRuns(
            time=self._database.now(),
            versions={
                run.run_id: self._version(run, rows)
                for run in rows
                if all_open or since is None or run.update_time >= since or self._delegates(run)
            },
            open_run_ids=[run.run_id for run in is_open],
            conversation_ids=sorted(named | {run.conversation_id for run in is_open}),
        )

    def _version(self, run: RunRow, rows: Sequence[RunRow]) -> str:
        children = [
            each
            for each in rows
            if each.parent_run_id == run.run_id and not each.reports_to and not run.state.is_terminal
        ]
        own = "" if run.state is RunState.QUEUED and run.worker_id is None else str(hash(repr(run)))
        parts = [own, *(self._version(child, rows) for child in children)]
        return ",".join(parts) if all(parts) else ""

    def _delegates(self, run: RunRow) -> bool:
        return any(call.state is CallState.DELEGATED for call in self._tables.calls_of(run.key))

    async def versions(self, keys: Sequence[ConversationKey]) -> Sequence[str]:
        await self._database.reach()
        return [str(hash(repr(row))) if (row := self._tables.conversations.get(key)) else "" for key in keys]
