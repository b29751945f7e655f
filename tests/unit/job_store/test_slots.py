"""Which due runs a worker may claim, and which messages bring the lease of their run (LOOP-13, LOOP-14)."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.ids import RunId, RunKey, StoreId, UserId, WorkerId
from pawl.job_store.ledger.rules.slots import (
    DueRun,
    FreeDrive,
    Line,
    SlotLimits,
    Slots,
    assign_slots,
    may_start,
)
from pawl.values import MessagePolicy, RunState
from tests.unit.job_store.world import STORE, World

DRIVE = FreeDrive(worker_id=WorkerId("w1"), lease_seconds=30.0)
LIMITS = st.builds(SlotLimits, per_store=st.integers(0, 3), per_user=st.integers(0, 3))
USERS = st.sampled_from(["ann", "bob", "cyd"])
ACTIVE = st.lists(USERS, max_size=4)


def slots_of(users: list[str], *, has_due: bool = False) -> Slots:
    by_user = {UserId(user): users.count(user) for user in ("ann", "bob", "cyd")}
    return Slots(used=len(users), used_by_user=by_user, has_due=has_due)


@given(ACTIVE, USERS, LIMITS, st.booleans())
def test_message_brings_its_lease_if_a_claim_would_get_only_that_run(
    active: list[str], user: str, limits: SlotLimits, has_due: bool
) -> None:
    slots = slots_of(active, has_due=has_due)
    run = DueRun(key=RunKey(StoreId("acme"), RunId("r")), user_id=UserId(user), is_active=False, at_last_chance=False)
    line = Line(due=[run], used=slots.used, used_by_user=slots.used_by_user)
    is_claimed = bool(assign_slots([line], limits, runs_max=1))
    assert may_start(slots, UserId(user), limits) == (is_claimed and not has_due)


@given(USERS, LIMITS)
def test_message_brings_no_lease_while_slots_are_not_counted(user: str, limits: SlotLimits) -> None:
    assert not may_start(None, UserId(user), limits)


@given(ACTIVE, st.lists(st.tuples(USERS, st.sampled_from(["accepted", "ended", "due"])), max_size=8), LIMITS)
def test_slots_follow_every_change_of_a_transaction(
    active: list[str], changes: list[tuple[str, str]], limits: SlotLimits
) -> None:
    """Whatever was accepted or ended before, the limits of the store and the user decide."""
    slots, users, has_due = slots_of(active), list(active), False
    for name, change in changes:
        user = UserId(name)
        fits = len(users) < limits.per_store and users.count(name) < limits.per_user and not has_due
        assert may_start(slots, user, limits) == fits
        if change == "accepted" and fits:
            slots = slots.changed(user, 1, is_due=False)
            users.append(name)
        elif change == "ended" and name in users:
            slots = slots.changed(user, -1, is_due=False)
            users.remove(name)
        elif change == "due":
            slots, has_due = slots.changed(user, 0, is_due=True), True


# The rule in the operation.


def accepting(slots: Slots | None = None) -> World:
    world = World()
    world.unit.slots.load(STORE, slots or slots_of([]))
    return world


def test_new_run_that_can_start_is_leased_with_its_first_epoch() -> None:
    world = accepting()
    found = world.submit(drive=DRIVE)
    run = found.run
    assert found.is_claimed
    assert (run.worker_id, run.epoch, run.crashes) == ("w1", 1, 0)
    assert (run.claim_at, run.start_time) == (world.now + timedelta(seconds=30), world.now)
    assert not world.unit.work_ready
    assert world.commit(run.run_id, state=RunState.RUNNING).first_seq


@pytest.mark.parametrize("policy", [MessagePolicy.QUEUE, MessagePolicy.STEER, MessagePolicy.INTERRUPT])
def test_message_to_a_busy_conversation_brings_no_lease(policy: MessagePolicy) -> None:
    world = accepting()
    world.start_run()
    found = world.submit(policy, drive=DRIVE)
    assert not found.is_claimed
    assert found.run.worker_id != "w1" or found.steered


def test_repeated_request_brings_no_lease() -> None:
    world = accepting()
    first, again = (world.submit(drive=DRIVE, request_id="r1") for _ in range(2))
    assert (first.is_claimed, again.is_claimed) == (True, False)
    assert again.run.epoch == 1


def test_messages_of_one_transaction_share_the_slots() -> None:
    """Also with those that bring no lease: their runs are due first."""
    limits = SlotLimits(per_store=2, per_user=1)
    world = accepting()
    asked = [("ann", "c1"), ("bob", "c2"), ("cyd", "c3")]
    found = [
        world.submit(drive=DRIVE, slots=limits, user_id=user, conversation_id=conversation).is_claimed
        for user, conversation in asked
    ]
    assert found == [True, True, False]
    world = accepting()
    assert not world.submit(conversation_id="c1").is_claimed
    assert world.unit.work_ready
    assert not world.submit(conversation_id="c2", drive=DRIVE).is_claimed


def test_background_runs_use_no_slots_but_go_first_if_due() -> None:
    world, limits = accepting(), SlotLimits(per_store=1, per_user=1)
    run = world.submit(conversation_id="c1").run
    world = accepting()
    world.unit.now = world.now
    world.unit.put_run(replace(run, worker_id=WorkerId("w2"), claim_at=None, in_background=True))
    assert world.unit.slots.get(STORE) == slots_of([])
    world.unit.put_run(replace(run, run_id=RunId("run_2"), in_background=True))
    assert not world.submit(drive=DRIVE, slots=limits, conversation_id="c2").is_claimed


def test_ended_run_frees_its_slot_for_later_messages_of_the_transaction() -> None:
    limits = SlotLimits(per_store=1, per_user=1)
    world = accepting()
    first = world.submit(drive=DRIVE, slots=limits, conversation_id="c1").run.run_id
    assert world.unit.slots.get(STORE) == slots_of(["ann"])
    world.commit(first, state=RunState.RUNNING)
    world.commit(first, state=RunState.COMPLETED)
    assert world.submit(drive=DRIVE, slots=limits, conversation_id="c2").is_claimed
