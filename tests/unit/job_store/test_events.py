"""Events: rows of the log, life-cycle events of jobs (NOTE-2), and content that is omitted because of its size."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.event.v1 import call_pb2, event_pb2
from pawl.job_store.ledger.ports import LogRow
from pawl.job_store.ledger.rpc import messages
from pawl.job_store.ledger.rpc.events import encode_event
from pawl.job_store.ledger.rpc.log_rows import ROW_BYTES_MAX, cut, pack, unpack
from pawl.job_store.ledger.rules.events import Event, OwnerEvent
from pawl.job_store.ledger.rules.rows import CallRow
from pawl.values import CallState, RunState, StopCause, WaitKind
from tests.unit.job_store.desk import Desk, desk_with_a_job

TIME, AGENT, APPROVAL, PAUSED = (
    {"state": RunState.WAITING, "waits": (kind,)}
    for kind in (WaitKind.TIME, WaitKind.AGENT, WaitKind.APPROVAL, WaitKind.PAUSED)
)
RUNNING = {"state": RunState.RUNNING}


def event_types(desk: Desk, run_id: str) -> list[str]:
    events = [event for event in desk.unit.events.rows if event.run_id == run_id]
    return [event.lifecycle_type for event in events if event.lifecycle_type]


def test_iterations_do_not_send_lifecycle_events() -> None:
    desk, job = desk_with_a_job()
    desk.take(job)
    for _ in range(50):
        for step in (TIME, RUNNING, AGENT, RUNNING):
            desk.commit(job, **step)
    desk.end(job)
    assert event_types(desk, job) == ["run.queued", "run.running", "run.completed"]


def test_a_job_that_waits_for_a_user_and_resumes_is_reported() -> None:
    """A notified user also learns that the need is over."""
    desk, job = desk_with_a_job()
    desk.take(job)
    for step in (TIME, APPROVAL, TIME, APPROVAL, RUNNING, TIME):
        desk.commit(job, **step)
    first_events = ["run.queued", "run.running"]
    assert event_types(desk, job) == [*first_events, "run.waiting", "run.waiting", "run.waiting", "run.running"]


def test_job_pauses_and_resumes_are_reported() -> None:
    desk, job = desk_with_a_job()
    desk.take(job)
    for step in (TIME, PAUSED, TIME, RUNNING, PAUSED, RUNNING, PAUSED):
        desk.commit(job, **step)
    desk.commit(job, state=RunState.CANCELLED, stop_cause=StopCause.USER)
    pauses = ["job.paused", "job.resumed", "job.paused", "job.resumed", "job.paused"]
    assert event_types(desk, job) == ["run.queued", "run.running", *pauses, "run.cancelled"]


def test_every_state_change_in_a_user_run_is_reported() -> None:
    desk, _ = desk_with_a_job()
    run_id = desk.start_run()
    for step in (TIME, RUNNING, AGENT, RUNNING):
        desk.commit(run_id, **step)
    assert event_types(desk, run_id)[-4:] == ["run.waiting", "run.running", "run.waiting", "run.running"]


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


def test_a_result_and_its_inverse_are_omitted_if_together_too_large() -> None:
    for content, inverse in ((b"1" * 200, b"{}"), (b"1", b"2" * 200), (b"1" * 60, b"2" * 60)):
        row = settled(content, inverse)
        cut, whole = messages.call(row, result_bytes_max=100), messages.call(row)
        assert not cut.HasField("result")
        assert cut.result_omitted_bytes == len(content) + len(inverse)
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
    """Return the events of each run, and its rows."""
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
def test_each_transaction_adds_one_row_per_run_or_several_large_ones(transactions: list[list[tuple[str, int]]]) -> None:
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
def test_any_cut_of_rows_has_the_same_events_as_single_ones(
    transactions: list[list[tuple[str, int]]], data: st.DataObject
) -> None:
    """This holds even if rows before the cut have been removed."""
    events, rows = written(transactions)
    for run_id, log in rows.items():
        after_seq = data.draw(st.integers(0, len(events[run_id]) + 1))
        events_max = data.draw(st.integers(1, len(events[run_id]) + 1))
        trimmed = data.draw(st.integers(0, after_seq))
        kept = [(row.first_seq, row.events) for row in log if row.last_seq > trimmed]
        assert cut(kept, after_seq, events_max) == events[run_id][after_seq : after_seq + events_max]
