"""Which due runs are claimed when several stores have some (LOOP-14)."""

from __future__ import annotations

from collections import Counter
from itertools import cycle, islice

from hypothesis import example, given
from hypothesis import strategies as st

from pawl.chassis.ids import RunId, RunKey, StoreId, UserId
from pawl.job_store.ledger.rules.slots import DueRun, Line, SlotLimits, Turns, assign_slots


def line(store: str, due: int, *, weight: int = 1) -> Line:
    return Line(
        due=[
            DueRun(
                key=RunKey(StoreId(store), RunId(f"run_{number}")),
                user_id=UserId("ann"),
                is_active=False,
                at_last_chance=False,
            )
            for number in range(due)
        ],
        limits=SlotLimits(per_store=1000, per_user=1000, weight=weight),
        used=0,
        used_by_user={},
    )


@given(
    weights=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    claims=st.lists(st.integers(1, 9), max_size=40),
    read=st.integers(1, 5),
)
@example(weights=[3, 1], claims=[1] * 16, read=1)
@example(weights=[3, 1], claims=[2] * 8, read=2)
def test_stores_get_turns_by_weight_however_few_runs_a_claim_takes(
    weights: list[int], claims: list[int], read: int
) -> None:
    """A claim reads some stores, starting from the one whose turn it is, and takes all its runs from these."""
    names = [StoreId(chr(ord("a") + number)) for number in range(len(weights))]
    expected = cycle(name for name, weight in zip(names, weights, strict=True) for _ in range(weight))
    turns = Turns()
    for runs_max in claims:
        following = sorted(names, key=lambda name: (name <= turns.after, name))[: max(read, runs_max)]
        assigned = assign_slots(
            [line(name, runs_max, weight=weights[names.index(name)]) for name in following], turns, runs_max=runs_max
        )
        assert [run.key.store_id for run in assigned.runs] == list(islice(expected, runs_max))
        turns = assigned.turns


def test_a_store_without_due_runs_loses_its_turns() -> None:
    """It does not get them later, and others do not wait for it."""
    runs = assign_slots([line("busy", 9), line("calm", 2), line("idle", 1)], Turns(), runs_max=6).runs
    assert Counter(run.key.store_id for run in runs) == {"busy": 3, "calm": 2, "idle": 1}
    turns = assign_slots([line("a", 1, weight=3)], Turns(), runs_max=1).turns
    assert assign_slots([line("b", 1)], turns, runs_max=1).turns == Turns(after=StoreId("b"))
