"""Which due runs are claimed when several stores have some (LOOP-14)."""

from __future__ import annotations

from collections import Counter

import pytest

from pawl.chassis.ids import RunId, RunKey, StoreId, UserId
from pawl.job_store.ledger.rules.slots import DueRun, Line, SlotLimits, assign_slots


def line(
    store: str, due: int, *, used: int = 0, weight: int = 1, active: int = 0, used_background: int | None = None
) -> Line:
    """Return a store with `due` runs, of which the first `active` already have slots.

    They are background runs if `used_background` is given.
    """
    return Line(
        due=[
            DueRun(
                key=RunKey(StoreId(store), RunId(f"run_{number}")),
                user_id=UserId("ann"),
                is_active=number < active,
                at_last_chance=False,
                is_background=used_background is not None,
            )
            for number in range(due)
        ],
        limits=SlotLimits(per_store=1000, per_user=1000, weight=weight),
        used=used,
        used_by_user={},
        used_background=used_background or 0,
    )


@pytest.mark.parametrize(
    ("lines", "runs_max", "expected"),
    [
        # A store with much load gets its turn last, but it does get turns.
        ([line("busy", 900, used=100), line("calm", 2), line("idle", 1)], 2, {"calm": 1, "idle": 1}),
        ([line("busy", 900, used=100), line("calm", 2), line("idle", 1)], 6, {"busy": 3, "calm": 2, "idle": 1}),
        ([line("busy", 900, used=100), line("calm", 2)], 1, {"calm": 1}),
        # Runs with slots are not delayed.
        ([line("calm", 2, used=1), line("busy", 900, used=100, active=1)], 1, {"busy": 1}),
        # Background runs have slots of their own.
        ([line("busy", 5, used_background=90), line("calm", 5, used=1, used_background=0)], 1, {"calm": 1}),
        # Turns and slots are in proportion to weights.
        ([line("one", 90), line("three", 90, weight=3)], 40, {"one": 10, "three": 30}),
        ([line("one", 90, used=20), line("three", 90, used=50, weight=3)], 1, {"three": 1}),
        ([line("alone", 900, used=100)], 50, {"alone": 50}),
    ],
)
def test_stores_get_turns_by_weight_and_those_with_fewer_slots_come_first(
    lines: list[Line], runs_max: int, expected: dict[str, int]
) -> None:
    picked = assign_slots(lines, runs_max=runs_max)
    assert Counter(run.key.store_id for run in picked) == expected
    for store in expected:
        numbers = [int(run.key.run_id.removeprefix("run_")) for run in picked if run.key.store_id == store]
        assert numbers == sorted(numbers), "a store's runs keep their order"
