"""Tokens that are added to a budget count once, and never beyond its ceiling (I2, I18)."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.chassis.ids import UserId
from pawl.errors import InboxChanged, RequestIdReused
from pawl.job_store.domain.command import Receipt, TopUp
from pawl.job_store.domain.events import ToppedUp
from pawl.job_store.domain.rows import TOKENS_MAX
from pawl.job_store.domain.states import CommandOutcome, LeaseAction, RunState
from tests.unit.job_store.world import World

ACCEPTED, DUPLICATE, LATE = CommandOutcome.ACCEPTED, CommandOutcome.DUPLICATE, CommandOutcome.LATE
REFUSED, UNKNOWN = CommandOutcome.REFUSED, CommandOutcome.UNKNOWN
BUDGET_WAIT = 4


def parked(world: World, *, token_budget: int = 100, token_ceiling: int = 0) -> str:
    """A run that waits for a top-up, without a deadline."""
    run_id = world.submit(token_budget=token_budget, token_ceiling=token_ceiling).run.run_id
    world.claim(run_id)
    world.commit(run_id, state=RunState.RUNNING)
    world.commit(run_id, state=RunState.WAITING, waits=(BUDGET_WAIT,), lease=LeaseAction.PARK)
    return run_id


def top_up(world: World, run_id: str, tokens: int = 50, command_id: str = "", **fields: Any) -> Receipt:
    return world.send(run_id, TopUp(tokens=tokens), command_id, **fields)


def test_a_top_up_raises_the_budget_once_is_told_and_wakes_the_run() -> None:
    world = World()
    run_id = parked(world)
    receipt = top_up(world, run_id, command_id="first")
    assert (receipt.outcome, receipt.run and receipt.run.token_budget) == (ACCEPTED, 150)
    assert top_up(world, run_id, command_id="first").outcome is DUPLICATE
    assert world.run(run_id).token_budget == 150
    assert world.event_types(run_id)[-1] == "run.topped_up"
    assert world.unit.events.rows[-1].body == ToppedUp(tokens=50, token_budget=150, user_id=UserId("ann"))
    assert world.claim(run_id) == 2


def test_a_repetition_with_other_tokens_is_refused() -> None:
    world = World()
    run_id = parked(world)
    top_up(world, run_id, 50, command_id="first")
    with pytest.raises(RequestIdReused):
        top_up(world, run_id, 51, command_id="first")


def test_the_ceiling_holds_over_all_top_ups_together() -> None:
    world = World()
    run_id = parked(world, token_ceiling=150)
    assert top_up(world, run_id, 30).outcome is ACCEPTED
    refused = top_up(world, run_id, 30)
    assert (refused.outcome, refused.reason, refused.message) == (
        REFUSED,
        "TOKEN_CEILING",
        "at most 20 tokens can still be added",
    )
    assert top_up(world, run_id, 20).outcome is ACCEPTED
    assert world.run(run_id).token_budget == 150


def test_a_budget_never_grows_beyond_what_can_be_counted() -> None:
    world = World()
    run_id = parked(world)
    assert top_up(world, run_id, TOKENS_MAX).reason == "TOKEN_CEILING"


def test_a_run_without_a_budget_has_nothing_to_add_to() -> None:
    world = World()
    run_id = world.begin()
    receipt = top_up(world, run_id)
    assert (receipt.outcome, receipt.reason) == (REFUSED, "NO_TOKEN_BUDGET")


def test_a_stopped_run_and_an_ended_one_take_no_tokens() -> None:
    world = World()
    run_id = parked(world)
    world.cancel(run_id)
    late = top_up(world, run_id)
    assert (late.outcome, late.reason) == (LATE, "RUN_ENDED")
    world.claim(run_id)
    world.commit(
        run_id, state=RunState.CANCELLED, consumed=tuple(c.command_id for c in world.unit.inbox(world.run(run_id)))
    )
    late = top_up(world, run_id)
    assert (late.outcome, late.reason) == (LATE, "RUN_ENDED")
    assert world.run(run_id).token_budget == 100


def test_a_stranger_s_top_up_is_of_no_known_run() -> None:
    world = World()
    run_id = parked(world)
    assert top_up(world, run_id, user_id="eve").outcome is UNKNOWN
    assert world.run(run_id).token_budget == 100


def test_a_run_does_not_end_for_want_of_tokens_that_were_added_meanwhile() -> None:
    """I1: the receipt was final; the owner reads it and goes on."""
    world = World()
    run_id = parked(world)
    top_up(world, run_id, command_id="first")
    world.claim(run_id)
    with pytest.raises(InboxChanged):
        world.commit(run_id, state=RunState.EXPIRED)
    world.commit(run_id, state=RunState.RUNNING, consumed=("first",))
    assert world.run(run_id).state is RunState.RUNNING
