"""Assigns slots to runs, and so decides which due runs a worker may claim (LOOP-14)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import msgspec

from pawl.chassis.ids import RunKey, StoreId, UserId


class SlotLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The maximum numbers of active runs per store and per user, and of active background runs per store.

    Background runs do not use other runs' slots. `weight` is how many turns the store gets for each turn of a store
    with weight 1.
    """

    per_store: int
    per_user: int
    background_per_store: int = 100
    weight: int = 1


class StoreSlots(msgspec.Struct):
    """The default limits, and the limits of stores that have their own. Both change with the settings."""

    default: SlotLimits
    overrides: Mapping[StoreId, SlotLimits] = {}

    def of(self, store_id: StoreId) -> SlotLimits:
        return self.overrides.get(store_id, self.default)


class DueRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a worker could claim now.

    An active run already has its slot.

    If a run is `at_last_chance`, one more crash quarantines it.
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

    @property
    def store_id(self) -> StoreId:
        return self.due[0].key.store_id


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """The order in which stores get slots.

    It is circular, and a store's weight is the number of turns that it gets in a row. The next turn goes to the first
    store that follows `after`. `store` has already had `taken` of its turns.
    """

    after: StoreId = StoreId("")
    store: StoreId = StoreId("")
    taken: int = 0


class Assigned(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that get a slot, and the turns that follow."""

    runs: Sequence[DueRun]
    turns: Turns


def assign_slots(
    lines: Sequence[Line],
    turns: Turns,
    *,
    runs_max: int,
    last_chances_max: int = 1,
    background_max: int | None = None,
) -> Assigned:
    """Return up to `runs_max` runs within the limits. The stores get their turns in the order of `lines`.

    At most `background_max` of these runs are background runs. If it is None, there is no such limit. Users at their
    limit are skipped, and do not block other users of the store. At most `last_chances_max` of the runs are at their
    last chance. If their worker then dies, it is clear which run caused this.
    """
    picked: list[DueRun] = []
    last_chances, background_left = 0, runs_max if background_max is None else background_max

    def fits(run: DueRun) -> bool:
        return (not run.is_background or background_left > 0) and (
            not run.at_last_chance or last_chances < last_chances_max
        )

    stores = [turns.after, *(line.store_id for line in lines)]
    after = turns
    waiting = deque(enumerate(map(_fitting, lines)))
    while waiting and len(picked) < runs_max:
        number, due = waiting.popleft()
        store_id, weight = stores[number + 1], lines[number].limits.weight
        taken = after.taken if after.store == store_id else 0
        for run in islice(filter(fits, due), min(max(1, weight - taken), runs_max - len(picked))):
            picked.append(run)
            taken += 1
            background_left -= run.is_background
            last_chances += run.at_last_chance
            after = Turns(after=stores[number], store=store_id, taken=taken)
        if taken >= weight:
            after = Turns(after=store_id)
            waiting.append((number, due))
    return Assigned(runs=picked, turns=after)


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
    """The key of a queue. A store has one queue for background runs and one for all other runs."""

    store_id: StoreId
    in_background: bool


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """One of a store's queues: the numbers of runs that have not started, of active runs, and of slots.

    See `RunRow.needs_slot`.
    """

    queued: int
    active: int
    slots: int

    @property
    def waiting(self) -> int:
        """The number of queued runs minus the number of free slots. It may be negative."""
        return self.queued - max(0, self.slots - self.active)
