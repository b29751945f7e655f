"""Which steps one statement can write, and that every change of a run, call or command gives a new version."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.ids import CallId, CallKey, ClientId, CommandId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.event.v1 import call_pb2, event_pb2
from pawl.job_store.ledger import cache
from pawl.job_store.ledger.cache import RunCache
from pawl.job_store.ledger.ports import LogRow
from pawl.job_store.ledger.rpc import messages
from pawl.job_store.ledger.rpc.events import encode_event
from pawl.job_store.ledger.rpc.log_rows import ROW_BYTES_MAX, cut, pack, unpack
from pawl.job_store.ledger.rules import steps
from pawl.job_store.ledger.rules.commit import Commit, NewMessage
from pawl.job_store.ledger.rules.events import Event, OwnerEvent
from pawl.job_store.ledger.rules.jobs import Entered
from pawl.job_store.ledger.rules.offers import ReleaseOffers, RenewOffers
from pawl.job_store.ledger.rules.rows import CallRow
from pawl.job_store.ledger.rules.steps import CachedRun, Step
from pawl.values import CallState, LeaseAction, RunState, StopCause, WaitKind
from tests.tables import for_each
from tests.unit.job_store.desk import Desk
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
def test_a_prepared_step_makes_the_same_changes_as_a_transaction(
    world: World, run_id: str, fields: dict[str, Any]
) -> None:
    world.commit(run_id, calls=(change("open", CallState.RUNNING),))
    (step,) = prepare(world, step_of(run_id, **fields), known=cached(world, run_id))

    assert step.outcome == world.apply(step_of(run_id, **fields))
    written, run = step.written(2), world.run(run_id)
    changed = CachedRun(
        run=run, version=2, calls=tuple(world.unit.open_calls(run)), conversation=world.unit.conversation_of(run)
    )
    assert written == changed


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
        {"commit_id": "c000002"},
        {"after_seq": 1},
        {"calls": (change("open", CallState.PROPOSED),)},
    ],
)
def test_other_steps_repetitions_and_refusals_are_left_to_the_transaction(
    world: World, run_id: str, fields: dict[str, Any]
) -> None:
    world.commit(run_id, calls=(change("open", CallState.RUNNING),))
    assert prepare(world, step_of(run_id, **fields), known=cached(world, run_id)) == []


def test_a_group_is_left_to_the_transaction_if_it_has_other_operations_or_two_steps_of_one_run(
    world: World, run_id: str
) -> None:
    first, second = step_of(run_id, events=(OUTPUT,)), step_of(run_id, commit_id="d1", events=(OUTPUT,))
    released, known = step_of(run_id, lease=LeaseAction.RELEASE), cached(world, run_id)
    assert (len(prepare(world, first, known=known)), prepare(world, first, known=None)) == (1, [])
    for group in ((first, second), (first, released), (released, first)):
        assert prepare(world, *group, known=known) == []


def test_a_run_never_goes_back_in_time_because_a_clock_that_did_is_read_again(world: World, run_id: str) -> None:
    known, start = cached(world, run_id), world.now
    for late, is_prepared in ((0.5, True), (2.0, False)):
        world.now = start - timedelta(seconds=late)
        found = prepare(world, step_of(run_id, events=(OUTPUT,)), known=known)
        assert [step.outcome.time for step in found] == [start] * is_prepared


def test_every_change_of_a_call_or_command_gives_the_run_a_new_version(world: World, run_id: str) -> None:
    """Otherwise a step that ignores the change could be written."""
    world.commit(run_id, calls=(change("front", CallState.OFFERED),))
    world.lease(run_id, "front", "client")
    held = ((RunKey(STORE, RunId(run_id)), CallKey(STORE, CallId("front"))),)
    for change_it in (
        partial(world.apply, RenewOffers(client_id=ClientId("client"), lease_seconds=9.0, calls=held)),
        partial(world.apply, ReleaseOffers(client_id=ClientId("client"), calls=held)),
        partial(world.cancel, run_id),
    ):
        stored = world.run(run_id)
        world.unit.runs.load(stored.key, stored)
        change_it()
        assert [before for before, _ in world.unit.runs.changed()] == [stored]


@pytest.mark.parametrize("leave", [World.steer, World.release])
def test_a_run_is_not_cached_if_it_has_unread_commands_or_has_left_its_worker(
    world: World, run_id: str, leave: Callable[[World, str], Any]
) -> None:
    key = world.run(run_id).key
    assert steps.after(world.unit, key, 1, None) is not None
    leave(world, run_id)
    assert steps.after(world.unit, key, 1, None) is None


def test_cache_is_bounded_and_estimates_the_time_for_a_second(
    world: World, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "RUNS_MAX", 2)
    seconds = [0.0]
    runs, one = RunCache(lambda: seconds[0]), cached(world, run_id)
    every = [replace(one, run=replace(one.run, run_id=f"r{number}")) for number in range(3)]
    for each in every:
        runs.put(each)
    assert [runs.get(each.key) for each in every] == [None, *every[1:]]
    runs.put(replace(every[2], run=replace(every[2].run, options=b"x" * cache.RUN_BYTES_MAX)))
    assert runs.get(every[2].key) is None
    assert runs.now() is None
    time = datetime(2026, 5, 1, tzinfo=UTC)
    runs.note_time(time)
    for late, now in ((0.5, time + timedelta(seconds=0.5)), (1.5, None)):
        seconds[0] = late
        assert runs.now() == now


# Events: rows of the log, lifecycle events of jobs (NOTE-2), and content that is omitted because of its size.


TIME, AGENT, APPROVAL, PAUSED = (
    {"state": RunState.WAITING, "waits": (kind,)}
    for kind in (WaitKind.TIME, WaitKind.AGENT, WaitKind.APPROVAL, WaitKind.PAUSED)
)
RUNNING = {"state": RunState.RUNNING}


@pytest.mark.parametrize(
    ("is_job", "changes", "lifecycle_types"),
    [
        (True, [*[TIME, RUNNING, AGENT, RUNNING] * 50, {"state": RunState.COMPLETED}], ["run.completed"]),
        (True, [TIME, APPROVAL, TIME, APPROVAL, RUNNING, TIME], [*["run.waiting"] * 3, "run.running"]),
        (
            True,
            [TIME, PAUSED, TIME, RUNNING, PAUSED, RUNNING, PAUSED, {"state": RunState.CANCELLED}],
            [*["job.paused", "job.resumed"] * 2, "job.paused", "run.cancelled"],
        ),
        (False, [TIME, RUNNING, AGENT, RUNNING], ["run.waiting", "run.running"] * 2),
    ],
    ids=["iterations", "a user is waited for", "pauses", "a user's run"],
)
def test_only_what_a_user_needs_to_know_about_a_job_is_a_lifecycle_event(
    desk: Desk, job: str, is_job: bool, changes: list[dict[str, Any]], lifecycle_types: list[str]
) -> None:
    """Iterations of a job are not reported. A notified user also learns that the need is over."""
    run_id = desk.take(job) if is_job else desk.start_run()
    for step in changes:
        desk.commit(run_id, **step, stop_cause=StopCause.USER if step["state"] is RunState.CANCELLED else None)
    events = [event.lifecycle_type for event in desk.unit.events.rows if event.run_id == run_id]
    assert [each for each in events if each] == ["run.queued", "run.running", *lifecycle_types]


NOW = datetime(2026, 1, 1, tzinfo=UTC)


def settled(content: bytes, inverse_arguments: bytes) -> CallRow:
    inverse = call_pb2.Inverse(tool_name="back", arguments_json=inverse_arguments)
    result = call_pb2.CallResult(content_json=content, inverse=inverse)
    return CallRow(
        store_id=StoreId("store"),
        call_id=CallId("call_1"),
        run_id=RunId("run_1"),
        conversation_id=ConversationId("conv_1"),
        user_id=UserId("me"),
        round=1,
        index=0,
        state=CallState.SUCCEEDED,
        tool_name="write",
        tool_version=1,
        fallback_tool_name="",
        arguments=b"{}",
        attempt=1,
        digest="",
        decision=None,
        deadline_time=None,
        offer=None,
        reserved_by="",
        result=result.SerializeToString(),
        spec=b"",
        create_time=NOW,
        state_time=NOW,
        start_time=NOW,
        end_time=NOW,
    )


@for_each(("content", "inverse"), [(b"1" * 200, b"{}"), (b"1", b"2" * 200), (b"1" * 60, b"2" * 60)])
def test_a_result_and_its_inverse_are_omitted_if_together_too_large(content: bytes, inverse: bytes) -> None:
    row = settled(content, inverse)
    cut, whole = messages.call(row, result_bytes_max=100), messages.call(row)
    assert (cut.HasField("result"), cut.result_omitted_bytes) == (False, len(content) + len(inverse))
    assert whole.result.inverse.arguments_json == inverse


RUNS = st.sampled_from(["run_1", "run_2"])
SIZES = st.sampled_from([0, 1, 100, ROW_BYTES_MAX // 3, ROW_BYTES_MAX // 2, ROW_BYTES_MAX])
# The events of several transactions: the runs that they belong to, and their sizes.
TRANSACTIONS = st.lists(st.lists(st.tuples(RUNS, SIZES), min_size=1, max_size=8), min_size=1, max_size=5)


def encoded(run_id: str, seq: int, size: int) -> tuple[Event, bytes]:
    delta = event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text="x" * size))
    event = Event(
        store_id=StoreId("acme"),
        conversation_id=ConversationId("conv_1"),
        run_id=RunId(run_id),
        seq=seq,
        time=datetime(2026, 5, 1, tzinfo=UTC),
        attempt=1,
        event_id=f"evt_{run_id}_{seq}",
        type="output.delta",
        body=OwnerEvent(type="output.delta", body=delta.SerializeToString()),
    )
    return event, encode_event(event)


def written(transactions: list[list[tuple[str, int]]]) -> tuple[dict[str, list[bytes]], dict[str, list[LogRow]]]:
    """Return the events and the rows of each run."""
    events: dict[str, list[bytes]] = {"run_1": [], "run_2": []}
    rows: dict[str, list[LogRow]] = {"run_1": [], "run_2": []}
    for transaction in transactions:
        written = []
        for run_id, size in transaction:
            event, payload = encoded(run_id, len(events[run_id]) + 1, size)
            events[run_id].append(payload)
            written.append((event, payload))
        for row in pack(written):
            rows[row.run_id].append(row)
    return events, rows


@given(TRANSACTIONS)
def test_each_transaction_adds_one_row_per_run_or_several_rows_if_they_are_large(
    transactions: list[list[tuple[str, int]]],
) -> None:
    events, rows = written(transactions)
    for run_id, log in rows.items():
        assert [event for row in log for event in unpack(row.events)] == events[run_id]
        bounds = [0, *(row.last_seq for row in log)]
        assert [(row.first_seq, row.last_seq) for row in log] == [(last + 1, end) for last, end in pairwise(bounds)]
        for row in log:
            assert len(unpack(row.events)) == row.last_seq - row.first_seq + 1
            assert sum(map(len, unpack(row.events))) <= ROW_BYTES_MAX or row.first_seq == row.last_seq
        small = all(size <= 100 for transaction in transactions for _, size in transaction)
        assert not small or len(log) == sum(any(name == run_id for name, _ in each) for each in transactions)


@given(TRANSACTIONS)
def test_rows_are_the_message_that_subscribers_decode(transactions: list[list[tuple[str, int]]]) -> None:
    for run_id, log in written(transactions)[1].items():
        decoded = [event for row in log for event in event_pb2.RunEvents.FromString(row.events).events]
        assert [(event.run_id, event.seq) for event in decoded] == [(run_id, seq) for seq in range(1, len(decoded) + 1)]


@given(TRANSACTIONS, st.data())
def test_any_cut_returns_the_same_events_however_they_are_grouped_into_rows(
    transactions: list[list[tuple[str, int]]], data: st.DataObject
) -> None:
    """Rows before the cut may have been removed."""
    events, rows = written(transactions)
    for run_id, log in rows.items():
        after_seq = data.draw(st.integers(0, len(events[run_id]) + 1))
        events_max = data.draw(st.integers(1, len(events[run_id]) + 1))
        trimmed = data.draw(st.integers(0, after_seq))
        kept = [(row.first_seq, row.events) for row in log if row.last_seq > trimmed]
        assert cut(kept, after_seq, events_max) == events[run_id][after_seq : after_seq + events_max]
