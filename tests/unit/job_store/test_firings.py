"""Firings of schedules and triggers whose new runs are refused."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.chassis.ids import RunId
from pawl.job_store.ledger.rules.deliver import Deliver
from pawl.job_store.ledger.rules.fire import Fire
from pawl.job_store.schedules.rules import Definition, FireRow, Owner, StarterRow, put
from pawl.job_store.triggers.rules import LaneRow, TriggerDefinition, TriggerRow
from pawl.values import Feature, Overlap, RunState
from tests.tables import for_each
from tests.unit.job_store.world import STORE, USER, World, submission

OWNER = Owner(store_id=STORE, user_id=USER)


def fire_schedule(world: World, last_run_id: str, **submit: Any) -> tuple[FireRow, StarterRow]:
    asked = Definition(name="x", text="x", interval_seconds=60, overlap=Overlap.CANCEL)
    row = put(None, asked, OWNER, world.now, new_id="sch", count=0, must_exist=False)
    world.unit.schedules.load(row.key, row)
    fired: FireRow = world.apply(
        Fire(
            schedule=row.key,
            generation=row.generation,
            last_run_id=RunId(last_run_id),
            expected_time=row.due_time,
            next_time=None,
            submit=submission(conversation_id="new", **submit),
            refusal="",
        )
    )
    return fired, world.unit.schedules.get(row.key) or row


def fire_trigger(world: World, last_run_id: str, **submit: Any) -> tuple[FireRow, StarterRow]:
    asked = TriggerDefinition(name="x", text="x", overlap=Overlap.CANCEL)
    row = TriggerRow(store_id=STORE, user_id=USER, name="x", create_time=world.now, trigger_id="trg", definition=asked)
    lane = LaneRow(store_id=STORE, trigger_id="trg", lane="a", last_run_id=RunId(last_run_id), update_time=world.now)
    world.unit.triggers.load(row.key, row)
    world.unit.lanes.load(lane.key, lane)
    delivered = world.apply(
        Deliver(
            trigger=row.key,
            generation=row.generation,
            event_id=f"event{world.number()}",
            lane="a",
            data=b"",
            conversation_key="",
            submit=submission(conversation_id="new", **submit),
            refusal="",
        )
    )
    return delivered.fire, world.unit.triggers.get(row.key) or row


@pytest.mark.parametrize("fire", [fire_schedule, fire_trigger])
@for_each(
    ("refusal", "expected"),
    [
        ({"is_full": True}, "SKIPPED 0: The store has reached its limit of stored bytes"),
        ({"off": frozenset({Feature.RUNS})}, "SKIPPED 0: the feature 'runs' is switched off"),
        ({"off": frozenset({Feature.SCHEDULES, Feature.TRIGGERS})}, "SKIPPED 0: the feature"),
        ({"refused_model": "big"}, "REFUSED 1: MODEL_NOT_ALLOWED: this store may not use the model 'big'"),
    ],
)
def test_a_refused_firing_does_not_cancel_the_previous_run(
    world: World, run_id: str, fire: Any, refusal: dict[str, Any], expected: str
) -> None:
    fired, row = fire(world, run_id, **refusal)
    assert f"{fired.outcome.name} {row.failures}: {fired.reason}".startswith(expected)
    assert world.run(run_id).state is RunState.RUNNING
