"""Calls completed from outside."""

from __future__ import annotations

import pytest

from pawl.chassis.ids import RunId, RunKey
from pawl.errors import RunNotFound
from pawl.job_store.ledger.rules.inbox import NoteCompletion
from pawl.values import CallState, LeaseAction, RunState, WaitKind
from tests.unit.job_store.world import STORE, World, change


def note(world: World, run_id: str, payload: bytes = b"call_1") -> None:
    world.apply(NoteCompletion(run=RunKey(STORE, RunId(run_id)), payload=payload))


def unread(world: World, run_id: str) -> list[bytes]:
    return [command.payload for command in world.unit.inbox(world.run(run_id))]


def test_a_completion_wakes_a_parked_run_and_is_stored_once(world: World, run_id: str) -> None:
    world.commit(run_id, calls=(change("call_1", CallState.RUNNING),))
    world.commit(run_id, state=RunState.WAITING, waits=(WaitKind.COMPLETION,), lease=LeaseAction.PARK)
    assert world.run(run_id).claim_at is None
    for _ in range(3):
        note(world, run_id)
    assert world.run(run_id).claim_at == world.now
    assert unread(world, run_id) == [b"call_1"]
    note(world, run_id, b"call_2")
    assert unread(world, run_id) == [b"call_1", b"call_2"]


def test_a_run_that_parks_with_an_unread_completion_resumes_immediately(world: World, run_id: str) -> None:
    world.commit(run_id, calls=(change("call_1", CallState.RUNNING),))
    note(world, run_id)
    world.commit(run_id, state=RunState.WAITING, waits=(WaitKind.COMPLETION,), lease=LeaseAction.PARK)
    assert world.run(run_id).claim_at == world.now


def test_completions_of_ended_or_unknown_runs_are_not_stored(world: World, run_id: str) -> None:
    world.commit(run_id, state=RunState.COMPLETED)
    note(world, run_id)
    assert unread(world, run_id) == []
    with pytest.raises(RunNotFound):
        note(world, "run_nope")
