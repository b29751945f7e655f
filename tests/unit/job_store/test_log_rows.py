"""Rows of several events read like rows of one event each."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.ids import ConversationId, RunId, StoreId
from pawl.event.v1 import event_pb2
from pawl.job_store.ledger.ports import LogRow
from pawl.job_store.ledger.rpc.events import encode_event
from pawl.job_store.ledger.rpc.log_rows import ROW_BYTES_MAX, cut, pack, unpack
from pawl.job_store.ledger.rules.events import Event, OwnerEvent

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
