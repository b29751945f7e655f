"""Places of active runs: which of the runs that are due a worker may have (LOOP-14)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from pawl.chassis.ids import RunKey, UserId


class PlaceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The most runs that may be active at once, of one store and of one of its users; and of those of the background.

    What goes on in the background takes no place of what people wait for.
    """

    per_store: int
    per_user: int
    background_per_store: int = 100


class DueRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a worker could have now. An active one has its place already.

    With one `at_last_chance` so many workers have died that it is quarantined if
    one more does.
    """

    key: RunKey
    user_id: UserId
    is_active: bool
    at_last_chance: bool
    is_background: bool = False


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one store that are due, in the order in which they are served, and the places that are taken.

    `taken_by_user` may leave out users of whom no run is due. Places of the background are apart, and of no user.
    """

    due: Sequence[DueRun]
    taken: int
    taken_by_user: Mapping[UserId, int]
    taken_background: int = 0


def share_out(
    lines: Sequence[Line],
    limits: PlaceLimits,
    *,
    runs_max: int,
    last_chances_max: int = 1,
    background_max: int | None = None,
) -> list[DueRun]:
    """Return up to `runs_max` runs that fit into the limits: of each line one in turn, each line in its order.

    Of the background at most `background_max` are among them; None means any. Who is at the limit is passed over and
    holds up nobody else of the store. So are runs at their last chance, but for `last_chances_max`: whose worker dies
    then is known to be the one that kills it.
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


def _fitting(line: Line, limits: PlaceLimits) -> Iterator[DueRun]:
    """Yield the runs that may be had, and count the places that they take."""
    taken, taken_by_user = line.taken, Counter(line.taken_by_user)
    background = line.taken_background
    for run in line.due:
        if run.is_background and not run.is_active:
            if background >= limits.background_per_store:
                continue
            background += 1
        elif not run.is_active:
            if taken >= limits.per_store or taken_by_user[run.user_id] >= limits.per_user:
                continue
            taken += 1
            taken_by_user[run.user_id] += 1
        yield run
