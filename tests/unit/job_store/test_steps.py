"""Which steps one statement can write, and that every change of a run, call or command gives a new version."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import CallKey, ClientId, CommandId, RunId, RunKey
from pawl.job_store.ledger import cache
from pawl.job_store.ledger.cache import RunCache
from pawl.job_store.ledger.rules import steps
from pawl.job_store.ledger.rules.commit import Commit, NewMessage
from pawl.job_store.ledger.rules.events import OwnerEvent
from pawl.job_store.ledger.rules.jobs import Entered
from pawl.job_store.ledger.rules.offers import ReleaseOffers, RenewOffers
from pawl.job_store.ledger.rules.steps import CachedRun, Step
from pawl.values import CallState, LeaseAction, RunState, WaitKind
from tests.unit.job_store.world import STORE, CountingIds, World, change, delegation

OUTPUT = OwnerEvent(type="output.delta", body=b"")
MESSAGE = NewMessage(message_id="", summarised_to=0, body=b"answer")


def cached(world: World, run_id: str) -> CachedRun:
    run = world.run(run_id)
    return CachedRun(
        run=run,
        version=1,
        calls=tuple(world.unit.open_calls(run)),
        conversation=world.unit.conversation_of(run),
    )


def step_of(run_id: str, **fields: Any) -> Commit:
    values: dict[str, Any] = {"run": RunKey(STORE, RunId(run_id)), "epoch": 1, "commit_id": "c9"}
    return Commit(**(values | fields))


def prepare(world: World, *operations: Any, known: CachedRun | None) -> list[Step]:
    return steps.prepare(operations, lambda _: known, world.now, CountingIds())


@pytest.mark.parametrize(
    "fields",
    [
        {"events": (OUTPUT,)},
        {"messages": (MESSAGE,), "usage": b"", "round": 2},
        {"calls": (change("new", CallState.RUNNABLE),)},
        {"calls": (change("open", CallState.SUCCEEDED),)},
        {"state": RunState.WAITING, "waits": (WaitKind.TIME,)},
        {"loop_state": b"state"},
    ],
)
def test_step_of_its_run_alone_is_prepared_with_the_changes_of_the_transaction(fields: dict[str, Any]) -> None:
    world = World()
    run_id = world.start_run()
    world.commit(run_id, calls=(change("open", CallState.RUNNING),))
    known = cached(world, run_id)
    (step,) = prepare(world, step_of(run_id, **fields), known=known)

    answer = world.apply(step_of(run_id, **fields))

    assert step.outcome == answer
    written = step.written(2)
    assert written is not None
    assert (written.run, written.conversation) == (world.run(run_id), world.unit.conversation_of(written.run))
    assert list(written.calls) == world.unit.open_calls(written.run)
    assert written.version == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"state": RunState.WAITING, "waits": (WaitKind.TIME,), "lease": LeaseAction.PARK, "wake_time": None},
        {"lease": LeaseAction.RELEASE},
        {"consumed": (CommandId("c"),)},
        {"budget_run_id": RunId("top")},
        {"entered": (Entered(run_id=RunId("job"), occasion=0),)},
        {"tells_iteration": 1},
        {
            "calls": (change("new", CallState.DELEGATED, child_run_id="child"),),
            "delegations": (delegation("new", "child"),),
        },
        {"epoch": 2},
        {"commit_id": "c000001"},
        {"after_seq": 1},
        {"calls": (change("open", CallState.PROPOSED),)},
    ],
)
def test_other_steps_and_refusals_are_left_to_the_transaction(fields: dict[str, Any]) -> None:
    world = World()
    run_id = world.start_run()
    world.commit(run_id, calls=(change("open", CallState.RUNNING),))
    assert prepare(world, step_of(run_id, **fields), known=cached(world, run_id)) == []


def test_repeated_step_is_left_to_the_transaction() -> None:
    world = World()
    run_id = world.start_run()
    world.commit(run_id, commit_id="c9", events=(OUTPUT,))
    assert prepare(world, step_of(run_id, events=(OUTPUT,)), known=cached(world, run_id)) == []


def test_group_with_another_operation_or_two_steps_of_a_run_is_left_to_the_transaction() -> None:
    world = World()
    run_id = world.start_run()
    first, second = step_of(run_id, events=(OUTPUT,)), step_of(run_id, commit_id="d1", events=(OUTPUT,))
    released, known = step_of(run_id, lease=LeaseAction.RELEASE), cached(world, run_id)
    assert len(prepare(world, first, known=known)) == 1
    assert prepare(world, first, known=None) == []
    for group in ((first, second), (first, released), (released, first)):
        assert prepare(world, *group, known=known) == []


def test_times_of_a_run_never_go_back_and_a_clock_that_did_is_read_again() -> None:
    world = World()
    run_id = world.start_run()
    known, start = cached(world, run_id), world.now
    for late, is_prepared in ((0.5, True), (2.0, False)):
        world.now = start - timedelta(seconds=late)
        found = prepare(world, step_of(run_id, events=(OUTPUT,)), known=known)
        assert [step.outcome.time for step in found] == [start] * is_prepared


def test_every_change_of_a_call_or_command_gives_the_run_a_new_version() -> None:
    """Otherwise a step that ignores the change could be written."""
    world = World()
    run_id = world.start_run()
    world.commit(run_id, calls=(change("front", CallState.OFFERED),))
    world.lease(run_id, "front", "client")
    held = ((RunKey(STORE, RunId(run_id)), CallKey(STORE, change("front", CallState.OFFERED).call_id)),)
    for operation in (
        RenewOffers(client_id=ClientId("client"), lease_seconds=9.0, calls=held),
        ReleaseOffers(client_id=ClientId("client"), calls=held),
    ):
        stored = world.run(run_id)
        world.unit.runs.load(stored.key, stored)
        world.apply(operation)
        assert [before for before, _ in world.unit.runs.changed()] == [stored]
    stored = world.run(run_id)
    world.unit.runs.load(stored.key, stored)
    world.cancel(run_id)
    assert [before for before, _ in world.unit.runs.changed()] == [stored]


def test_run_with_unread_commands_is_not_cached_nor_one_that_left_its_worker() -> None:
    world = World()
    run_id = world.start_run()
    key = world.run(run_id).key
    assert steps.after(world.unit, key, 1, None) is not None
    world.steer(run_id)
    assert steps.after(world.unit, key, 1, None) is None
    other = World()
    run_id = other.start_run()
    other.release(run_id)
    assert steps.after(other.unit, other.run(run_id).key, 1, None) is None


def test_cache_is_bounded_and_estimates_the_time_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "RUNS_MAX", 2)
    seconds = [0.0]
    runs = RunCache(lambda: seconds[0])
    world = World()
    one = cached(world, world.start_run())
    every = [replace(one, run=replace(one.run, run_id=f"r{number}")) for number in range(3)]
    for each in every:
        runs.put(each)
    assert [runs.get(each.key) for each in every] == [None, *every[1:]]
    runs.put(replace(every[2], run=replace(every[2].run, options=b"x" * cache.RUN_BYTES_MAX)))
    assert runs.get(every[2].key) is None
    assert runs.now() is None
    time = datetime(2026, 5, 1, tzinfo=UTC)
    runs.note_time(time)
    seconds[0] = 0.5
    assert runs.now() == time + timedelta(seconds=0.5)
    seconds[0] = 1.5
    assert runs.now() is None
