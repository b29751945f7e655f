"""In-memory schedules for job-store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace

from pawl.chassis.ids import RunId, RunKey, StoreId, UserId
from pawl.job_store.schedules.rules import CLAIM_SECONDS, POLL_SECONDS, Change, ClaimedSchedule, ScheduleRow
from pawl.job_store.schedules.store import PostgresSchedules
from pawl.values import RunState
from tests.simulation.chance import Chance
from tests.simulation.store import Database, ScheduleChange

_PLAYED = 0.4


def are_played(chance: Chance) -> bool:
    return chance.stream("schedules").random() < _PLAYED


class MemorySchedules(PostgresSchedules):
    def __init__(self, database: Database) -> None:
        self._memory = database
        self._rows = database.tables.schedules

    def _find(self, store_id: StoreId, user_id: UserId, name: str) -> ScheduleRow | None:
        rows = self._rows.values()
        return next((r for r in rows if (r.store_id, r.user_id, r.name) == (store_id, user_id, name)), None)

    async def change(self, store_id: StoreId, user_id: UserId, name: str, change: Change) -> ScheduleRow:
        await self._memory.reach(writes=True)
        row, now = self._find(store_id, user_id, name), self._memory.now()
        changed = change(row, len(await self._of(store_id, user_id)), now)
        if changed is not row:
            self._rows[changed.key] = changed
            self._memory.tables.schedule_changes.append(ScheduleChange(row, changed, now))
        await self._memory.answer()
        return changed

    async def get(
        self, store_id: StoreId, user_id: UserId, name: str
    ) -> tuple[ScheduleRow, Mapping[RunId, RunState], datetime] | None:
        await self._memory.reach()
        row = self._find(store_id, user_id, name)
        return None if row is None else (row, {}, self._memory.now())

    async def list(self, store_id: StoreId, user_id: UserId) -> Sequence[ScheduleRow]:
        await self._memory.reach()
        return await self._of(store_id, user_id)

    async def _of(self, store_id: StoreId, user_id: UserId) -> Sequence[ScheduleRow]:
        return [row for row in self._rows.values() if (row.store_id, row.user_id) == (store_id, user_id)]

    async def delete(self, store_id: StoreId, user_id: UserId, name: str) -> bool:
        await self._memory.reach(writes=True)
        row = self._find(store_id, user_id, name)
        return row is not None and bool(self._rows.pop(row.key))

    async def claim(self, *, schedules_max: int) -> Sequence[ClaimedSchedule]:
        await self._memory.reach(writes=True)
        now, claimed = self._memory.now(), []
        due = [(row.claim_at, row.key) for row in self._rows.values() if row.claim_at is not None]
        for _, key in sorted(each for each in due if each[0] <= now)[:schedules_max]:
            row = self._rows[key]
            run = self._memory.tables.runs.get(RunKey(row.store_id, row.last_run_id))
            is_busy = run is not None and not run.state.is_terminal
            if is_busy and (row.due_time is None or row.due_time > now):
                times = [time for time in (row.due_time, now + timedelta(seconds=POLL_SECONDS)) if time is not None]
                self._rows[key] = replace(row, claim_at=min(times))
            else:
                self._rows[key] = replace(row, claim_at=now + timedelta(seconds=CLAIM_SECONDS))
                claimed.append(ClaimedSchedule(row=self._rows[key], now=now, is_busy=is_busy))
                claims = self._memory.tables.schedule_claims
                claims[key] = max(now, claims.get(key, now))
        await self._memory.answer()
        return claimed

    async def wait_seconds(self) -> float | None:
        await self._memory.reach()
        first = min((row.claim_at for row in self._rows.values() if row.claim_at is not None), default=None)
        return None if first is None else (first - self._memory.now()).total_seconds()
