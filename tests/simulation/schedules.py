"""In-memory schedules and triggers for job-store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace

from pawl.chassis.ids import RunId, RunKey, StoreId, UserId
from pawl.job_store.schedules.rules import CLAIM_SECONDS, POLL_SECONDS, Change, ClaimedSchedule, ScheduleRow
from pawl.job_store.schedules.store import PostgresSchedules
from pawl.job_store.triggers.rules import LaneRow, TriggerChange, TriggerKey, TriggerRow
from pawl.job_store.triggers.store import PostgresTriggers
from pawl.values import RunState
from tests.simulation.chance import Chance
from tests.simulation.store import Database, ScheduleChange, reached

_TRIGGERS_PLAYED = 0.3


def triggers_are_played(chance: Chance) -> bool:
    return chance.stream("triggers").random() < _TRIGGERS_PLAYED


class MemoryTriggers(PostgresTriggers):
    def __init__(self, database: Database) -> None:
        self._memory = database
        self._rows = database.tables.starters.triggers

    def _find(self, store_id: StoreId, user_id: UserId, name: str) -> TriggerRow | None:
        rows = self._rows.values()
        return next((r for r in rows if (r.store_id, r.user_id, r.name) == (store_id, user_id, name)), None)

    def _of(self, store_id: StoreId, user_id: UserId) -> list[TriggerRow]:
        found = [row for row in self._rows.values() if (row.store_id, row.user_id) == (store_id, user_id)]
        return sorted(found, key=lambda row: row.name)

    @reached(writes=True, answers=True)
    def change(
        self, store_id: StoreId, user_id: UserId, name: str, change: TriggerChange, *, validate_only: bool = False
    ) -> TriggerRow:
        row = self._find(store_id, user_id, name)
        changed = change(row, len(self._of(store_id, user_id)), self._memory.now())
        if not validate_only:
            self._rows[changed.key] = changed
        return changed

    @reached()
    def get(
        self, store_id: StoreId, user_id: UserId, name: str
    ) -> tuple[TriggerRow, Mapping[RunId, RunState], datetime] | None:
        row = self._find(store_id, user_id, name)
        if row is None:
            return None
        runs = self._memory.tables.runs
        keys = [RunKey(store_id, fire.run_id) for fire in row.fires if fire.run_id]
        return row, {key.run_id: runs[key].state for key in keys if key in runs}, self._memory.now()

    @reached(writes=True)
    def add_refusals(self, key: TriggerKey, count: int, reason: str) -> None:
        row = self._rows[key]
        now, count = self._memory.now(), row.refused_count + count
        self._rows[key] = replace(row, refused_count=count, refused_time=now, refused_reason=reason)

    @reached()
    def of_id(self, store_id: StoreId, trigger_id: str) -> tuple[TriggerRow, datetime] | None:
        row = self._rows.get(TriggerKey(store_id, trigger_id))
        return None if row is None else (row, self._memory.now())

    async def delete(self, store_id: StoreId, user_id: UserId, name: str) -> bool:
        await self._memory.reach(writes=True)
        row = self._find(store_id, user_id, name)
        if row is None:
            return False
        self._memory.tables.starters.remove(row.key)
        await self._memory.answer()
        return True

    @reached(writes=True, answers=True)
    def claim(self, *, events_max: int) -> Sequence[tuple[TriggerRow, LaneRow]]:
        now, claimed = self._memory.now(), []
        due = [lane for lane in self._lanes() if lane.claim_at is not None and lane.claim_at <= now]
        for lane in sorted(due, key=lambda lane: (lane.claim_at, lane.key))[:events_max]:
            trigger = self._rows[TriggerKey(lane.store_id, lane.trigger_id)]
            run = self._memory.tables.runs.get(RunKey(lane.store_id, lane.last_run_id))
            is_busy = lane.awaits_run and run is not None and not run.state.is_terminal
            is_paused = trigger.pause_time is not None
            seconds = POLL_SECONDS if is_busy and not is_paused else CLAIM_SECONDS
            kept = replace(lane, claim_at=now + timedelta(seconds=seconds))
            self._memory.tables.starters.lanes[lane.key] = kept
            if not (is_busy or is_paused):
                claimed.append((trigger, kept))
        return claimed

    def _lanes(self) -> list[LaneRow]:
        return list(self._memory.tables.starters.lanes.values())

    @reached()
    def wait_seconds(self) -> float | None:
        first = min((lane.claim_at for lane in self._lanes() if lane.claim_at is not None), default=None)
        return None if first is None else (first - self._memory.now()).total_seconds()

    async def lease_mailboxes(self, reader_id: str) -> Sequence[TriggerRow]:
        return ()

    @reached()
    def list(self, store_id: StoreId, user_id: UserId) -> Sequence[TriggerRow]:
        return self._of(store_id, user_id)


_SCHEDULES_PLAYED = 0.4


def schedules_are_played(chance: Chance) -> bool:
    return chance.stream("schedules").random() < _SCHEDULES_PLAYED


class MemorySchedules(PostgresSchedules):
    def __init__(self, database: Database) -> None:
        self._memory = database
        self._rows = database.tables.schedules

    def _find(self, store_id: StoreId, user_id: UserId, name: str) -> ScheduleRow | None:
        rows = self._rows.values()
        return next((r for r in rows if (r.store_id, r.user_id, r.name) == (store_id, user_id, name)), None)

    @reached(writes=True, answers=True)
    def change(
        self, store_id: StoreId, user_id: UserId, name: str, change: Change, *, validate_only: bool = False
    ) -> ScheduleRow:
        row, now = self._find(store_id, user_id, name), self._memory.now()
        changed = change(row, len(self._of(store_id, user_id)), now)
        if changed is not row and not validate_only:
            self._rows[changed.key] = changed
            self._memory.tables.schedule_changes.append(ScheduleChange(row, changed, now))
        return changed

    @reached()
    def get(
        self, store_id: StoreId, user_id: UserId, name: str
    ) -> tuple[ScheduleRow, Mapping[RunId, RunState], datetime] | None:
        row = self._find(store_id, user_id, name)
        return None if row is None else (row, {}, self._memory.now())

    @reached()
    def list(self, store_id: StoreId, user_id: UserId) -> Sequence[ScheduleRow]:
        return self._of(store_id, user_id)

    def _of(self, store_id: StoreId, user_id: UserId) -> Sequence[ScheduleRow]:
        return [row for row in self._rows.values() if (row.store_id, row.user_id) == (store_id, user_id)]

    async def delete(self, store_id: StoreId, user_id: UserId, name: str) -> bool:
        await self._memory.reach(writes=True)
        row = self._find(store_id, user_id, name)
        return row is not None and bool(self._rows.pop(row.key))

    @reached(writes=True, answers=True)
    def claim(self, *, schedules_max: int) -> Sequence[ClaimedSchedule]:
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
        return claimed

    @reached()
    def wait_seconds(self) -> float | None:
        first = min((row.claim_at for row in self._rows.values() if row.claim_at is not None), default=None)
        return None if first is None else (first - self._memory.now()).total_seconds()
