"""Assigns slots to runs: which due runs a worker may claim (LOOP-14)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from pawl.chassis.ids import RunKey, UserId, WorkerId


class SlotLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Maximum numbers of active runs: per store, per user, and in the background per store.

    Background runs do not use other runs' slots.
    """

    per_store: int
    per_user: int
    background_per_store: int = 100

    def have_room(self, used: int, used_by_user: int) -> bool:
        return used < self.per_store and used_by_user < self.per_user


class FreeDrive(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that can drive one more run, with the duration of its leases."""

    worker_id: WorkerId
    lease_seconds: float


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """The slots that a store's runs use, except for background runs, and whether any of its runs is due.

    `used_by_user` is complete only for the users that were asked for.
    """

    used: int
    used_by_user: Mapping[UserId, int]
    has_due: bool

    def changed(self, user_id: UserId, used: int, *, is_due: bool) -> Slots:
        """Return the slots after a run of a user took (1) or left (-1) one, or became due."""
        by_user = {**self.used_by_user, user_id: self.used_by_user.get(user_id, 0) + used}
        return Slots(used=self.used + used, used_by_user=by_user, has_due=self.has_due or is_due)


def may_start(slots: Slots | None, user_id: UserId, limits: SlotLimits) -> bool:
    """Return whether a run that is being accepted may get a lease immediately: it passes no due run of its store.

    `slots` is None if other claims may change them, so that no limit could be checked.
    """
    return slots is not None and not slots.has_due and limits.have_room(slots.used, slots.used_by_user[user_id])


class DueRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a worker could claim now.

    An active run already has its slot.

    A run `at_last_chance` is quarantined if one more worker dies.
    """

    key: RunKey
    user_id: UserId
    is_active: bool
    at_last_chance: bool
    is_background: bool = False


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The due runs of one store, in the order in which they are served, and its used slots.

    `used_by_user` may omit users without due runs. Background slots are separate and not per user.
    """

    due: Sequence[DueRun]
    used: int
    used_by_user: Mapping[UserId, int]
    used_background: int = 0


def assign_slots(
    lines: Sequence[Line],
    limits: SlotLimits,
    *,
    runs_max: int,
    last_chances_max: int = 1,
    background_max: int | None = None,
) -> list[DueRun]:
    """Return up to `runs_max` runs within the limits, taking one run from each line in turn.

    At most `background_max` of them are background runs; None means any number. Users at their limit are skipped and do
    not block the store's other users. At most `last_chances_max` runs are at their last chance, so that the cause is
    known if their worker dies.
    """
    picked: list[DueRun] = []
    last_chances, background_left = 0, runs_max if background_max is None else background_max
    turns = deque(_fitting(line, limits) for line in lines)
    while turns and len(picked) < runs_max:
        turn = turns.popleft()
        run = next(turn, None)
        if run is None:
            continue
        turns.append(turn)
        if run.is_background:
            if background_left <= 0:
                continue
            background_left -= 1
        if run.at_last_chance:
            if last_chances == last_chances_max:
                continue
            last_chances += 1
        picked.append(run)
    return picked


def _fitting(line: Line, limits: SlotLimits) -> Iterator[DueRun]:
    used, used_by_user = line.used, Counter(line.used_by_user)
    background = line.used_background
    for run in line.due:
        if run.is_background and not run.is_active:
            if background >= limits.background_per_store:
                continue
            background += 1
        elif not run.is_active:
            if not limits.have_room(used, used_by_user[run.user_id]):
                continue
            used += 1
            used_by_user[run.user_id] += 1
        yield run
