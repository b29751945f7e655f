"""Saves schedules, claims due schedules and fires them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final, Generic, NamedTuple

from pawl.chassis.ids import IdSource, RunId, StoreId, UserId
from pawl.errors import PawlError, ScheduleNotFound
from pawl.job_store.ledger.group_commit import GroupCommit, Lane
from pawl.job_store.ledger.metrics import PrometheusMeter
from pawl.job_store.ledger.rules.fire import Fire
from pawl.job_store.ledger.store.starters import PostgresStarters
from pawl.job_store.schedules import rules as schedules
from pawl.job_store.schedules import timing
from pawl.job_store.schedules.rules import ClaimedSchedule, Definition, FireRow, Owner, ScheduleRow, StarterT
from pawl.job_store.schedules.store import PostgresSchedules
from pawl.server.db.database import read_each
from pawl.values import RunState

# Maximum pause between claims, so that newly due schedules are found.
WAIT_SECONDS_MAX: Final = 5.0
# The pause before claiming again if due schedules are locked, usually by another claim.
HELD_SECONDS: Final = 0.05


class DueSchedule(NamedTuple):
    row: ScheduleRow
    expected_time: datetime | None = None
    next_time: datetime | None = None


class Starters(Generic[StarterT]):
    """Operations that schedules and triggers share. Methods raise `absent` if the row does not exist."""

    def __init__(self, rows: PostgresStarters[StarterT], absent: type[PawlError]) -> None:
        self._rows = rows
        self._absent = absent
        self.list = rows.list

    async def get(
        self, store_id: StoreId, user_id: UserId, name: str
    ) -> tuple[StarterT, Mapping[RunId, RunState], datetime]:
        """Return a row, the states of the runs in its `fires` that still exist, and the time.

        Raises:
            ScheduleNotFound, TriggerNotFound: The row does not exist.
        """
        found = await self._rows.get(store_id, user_id, name)
        if found is None:
            raise self._absent
        return found

    async def delete(self, store_id: StoreId, user_id: UserId, name: str) -> None:
        """Remove a row with its history and waiting events.

        Raises:
            ScheduleNotFound, TriggerNotFound: The row does not exist.
        """
        if not await self._rows.delete(store_id, user_id, name):
            raise self._absent

    async def _change(
        self, store_id: StoreId, user_id: UserId, name: str, change: Callable[[StarterT, datetime], StarterT]
    ) -> StarterT:
        def changed(row: StarterT | None, _: int, now: datetime) -> StarterT:
            if row is None:
                raise self._absent
            return change(row, now)

        return await self._rows.change(store_id, user_id, name, changed)


class Schedules(Starters[ScheduleRow]):
    def __init__(
        self, repository: PostgresSchedules, group_commit: GroupCommit, meter: PrometheusMeter, ids: IdSource
    ) -> None:
        super().__init__(repository, ScheduleNotFound)
        self._repository = repository
        self._group_commit = group_commit
        self._meter = meter
        self._ids = ids

    async def put(
        self, owner: Owner, requested: Definition, *, must_exist: bool, validate_only: bool = False
    ) -> ScheduleRow:
        """Create or change a schedule. With `validate_only`, nothing is stored.

        Idempotent.

        Raises:
            InvalidField: The timing is invalid.
            ScheduleExists, ScheduleNotFound, TooLarge: See `schedules.put`.
        """
        timing.check(requested)
        new_id = self._ids.new("sch")
        return await self._repository.change(
            owner.store_id,
            owner.user_id,
            requested.name,
            lambda row, count, now: schedules.put(
                row, requested, owner, now, new_id=new_id, count=count, must_exist=must_exist
            ),
            validate_only=validate_only,
        )

    async def pause(self, owner: Owner, name: str, note: str, *, paused: bool) -> ScheduleRow:
        """Pause a schedule, or resume it with the credential in `owner`.

        Idempotent.

        Raises:
            ScheduleNotFound: The schedule does not exist.
        """
        return await self._change(
            owner.store_id,
            owner.user_id,
            name,
            lambda row, now: schedules.paused(row, note, now) if paused else schedules.resumed(row, owner, now),
        )

    async def claim(self, schedules_max: int) -> tuple[Sequence[DueSchedule], float]:
        """Claim due schedules. Return them, and how many seconds to wait before the next claim.

        A schedule whose next scheduled time cannot be computed is skipped until its claim expires.
        """
        claimed = await self._repository.claim(schedules_max=schedules_max)
        due = read_each("schedule", claimed, _due, lambda each: each.row.schedule_id)
        if len(claimed) == schedules_max:
            return due, 0.0
        return due, pause_seconds(await self._repository.wait_seconds(), len(claimed))

    async def fire(self, fire: Fire, size_bytes: int) -> FireRow | None:
        """Fire a schedule.

        If the schedule has changed since it was claimed, do nothing and return None.

        Raises:
            ScheduleNotFound: The schedule does not exist.
            RequestIdReused: The request id was used with a different payload.
        """
        # A user may be waiting for a manual firing, but not for a scheduled one.
        lane = Lane.PEOPLE if fire.expected_time is None else Lane.WORK
        fired = await self._group_commit.run(fire, size_bytes=size_bytes, lane=lane, store_id=fire.schedule.store_id)
        if fired is not None:
            late = (fired.fire_time - fired.due_time).total_seconds()
            self._meter.schedule_fired(fired.outcome.name.lower(), 0.0 if fired.triggered else late)
        return fired


def pause_seconds(wait_seconds: float | None, claimed: int) -> float:
    """Return the number of seconds until the next claim.

    `wait_seconds` is the time until the next row is due, or None if no row will be due. `claimed` is the number of rows
    that were just claimed.
    """
    if wait_seconds is not None and wait_seconds <= 0:
        return 0.0 if claimed else HELD_SECONDS
    return WAIT_SECONDS_MAX if wait_seconds is None else min(wait_seconds, WAIT_SECONDS_MAX)


def _due(claimed: ClaimedSchedule) -> DueSchedule:
    row = claimed.row
    if (row.waiting_time is not None and not claimed.is_busy) or row.due_time is None:
        return DueSchedule(row=row, expected_time=row.waiting_time)
    next_time = timing.following(row.definition, row.schedule_id, row.due_time, claimed.now)
    return DueSchedule(row=row, expected_time=row.due_time, next_time=next_time)
