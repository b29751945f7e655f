"""Assigns slots to runs. This determines which due runs a worker may claim (LOOP-14)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Protocol, TypeAlias

import msgspec

from pawl.chassis.ids import RunKey, StoreId, UserId


class SlotLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The maximum numbers of active runs per store and per user, and of active background runs per store.

    Background runs do not use other runs' slots. `weight` is how many turns the store gets for each turn of another.
    """

    per_store: int
    per_user: int
    background_per_store: int = 100
    weight: int = 1

    @property
    def default(self) -> SlotLimits:
        return self

    def of(self, _store_id: StoreId) -> SlotLimits:
        return self

    @property
    def overrides(self) -> Mapping[StoreId, SlotLimits]:
        return {}


class StoreSlots(Protocol):
    """The default limits, and the limits of stores that have their own limits."""

    @property
    def default(self) -> SlotLimits: ...

    @property
    def overrides(self) -> Mapping[StoreId, SlotLimits]: ...

    def of(self, store_id: StoreId, /) -> SlotLimits: ...


class DueRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a worker could claim now.

    An active run already has its slot.

    If a run is `at_last_chance`, it is quarantined as soon as one more worker dies.
    """

    key: RunKey
    user_id: UserId
    is_active: bool
    at_last_chance: bool
    is_background: bool = False


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The due runs of one store in the order in which they are served, with the store's limits and used slots.

    `used_by_user` may omit users who have no due runs. Background slots are separate and are not counted per user.
    """

    due: Sequence[DueRun]
    limits: SlotLimits
    used: int
    used_by_user: Mapping[UserId, int]
    used_background: int = 0


def assign_slots(
    lines: Sequence[Line],
    *,
    runs_max: int,
    last_chances_max: int = 1,
    background_max: int | None = None,
) -> list[DueRun]:
    """Return up to `runs_max` runs within the limits, taking runs from each store in turn, in proportion to its weight.

    Of stores that have had equally many turns, the one with fewer used slots for its weight is first, except that runs
    that already have a slot come first. So a store with much load does not delay the runs of others.

    At most `background_max` of these runs are background runs. None means that there is no such limit. Users at their
    limit are skipped, and do not block other users of the store. At most `last_chances_max` runs are at their last
    chance, so that it is clear which run was the cause if their worker dies.
    """
    picked: list[DueRun] = []
    last_chances, background_left = 0, runs_max if background_max is None else background_max
    turns = [turn for number, line in enumerate(lines) if (turn := _turn(line, number, _fitting(line), 0))]
    heapify(turns)
    while turns and len(picked) < runs_max:
        _, _, number, taken, run, following = turns[0]
        after = _turn(lines[number], number, following, taken + 1)
        if after is None:
            heappop(turns)
        else:
            heapreplace(turns, after)
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


# Turns taken per weight, used slots per weight, number of the line, turns taken, the next run, and those after it.
_Turn: TypeAlias = tuple[float, float, int, int, DueRun, Iterator[DueRun]]


def _turn(line: Line, number: int, following: Iterator[DueRun], taken: int) -> _Turn | None:
    run = next(following, None)
    if run is None:
        return None
    used = line.used_background if run.is_background else line.used
    used_by_weight = 0 if run.is_active else used / line.limits.weight
    return taken / line.limits.weight, used_by_weight, number, taken, run, following


def _fitting(line: Line) -> Iterator[DueRun]:
    limits, used, used_by_user = line.limits, line.used, Counter(line.used_by_user)
    background = line.used_background
    for run in line.due:
        if run.is_background and not run.is_active:
            if background >= limits.background_per_store:
                continue
            background += 1
        elif not run.is_active:
            if used >= limits.per_store or used_by_user[run.user_id] >= limits.per_user:
                continue
            used += 1
            used_by_user[run.user_id] += 1
        yield run


class QueueKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """Key of a queue. A store has one queue for background runs and one for all other runs."""

    store_id: StoreId
    in_background: bool


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one of a store's queues: the number of runs that have not started, of active runs, and of slots.

    See `RunRow.needs_slot`.
    """

    queued: int
    active: int
    slots: int

    @property
    def waiting(self) -> int:
        """Number of runs that wait for a slot, without those for which a slot is free."""
        return self.queued - max(0, self.slots - self.active)
