"""The log as its readers see it does not show how its events are stored in rows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import pytest

from pawl.chassis.db.database import Database
from pawl.chassis.ids import RunId, RunKey, StoreId
from pawl.event.v1 import call_pb2, event_pb2
from pawl.job_store.ledger.ports import Lifecycle, StreamEnd
from pawl.job_store.ledger.rpc.log_rows import ROW_BYTES_MAX
from pawl.job_store.ledger.rules.trimming import Trim
from pawl.job_store.ledger.store import upkeep
from pawl.job_store.lifecycle.store import PostgresOutbox
from pawl.job_store.lifecycle.stream import JetStreamLifecycle
from tests.rpc.job_store.user import DIGEST, Owner, User

SIZES = (1, 100, ROW_BYTES_MAX // 3, ROW_BYTES_MAX)
BOUNDS = "SELECT first_seq, last_seq FROM job_store.events WHERE run_id = $1 ORDER BY last_seq"


def output(size: int) -> event_pb2.RunEvent:
    return event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text="x" * size))


async def bounds(database: Database, owner: Owner) -> list[tuple[int, int]]:
    return [(record[0], record[1]) for record in await database.fetch(BOUNDS, owner.run_id)]


async def trim(database: Database, owner: Owner, seq: int) -> None:
    """Trim the log of a run up to a seq, as in a running series."""
    async with database.transaction() as connection:
        key = RunKey(StoreId("acme"), RunId(owner.run_id))
        await upkeep.remove(connection, [Trim(run=key, round=0, seq=seq)])
        await connection.execute("UPDATE job_store.runs SET trimmed_log_seq = $2 WHERE run_id = $1", owner.run_id, seq)


async def read_all(
    user: User, owner: Owner, after_seq: int, events_max: int
) -> tuple[tuple[int, int] | None, list[event_pb2.RunEvent]]:
    """Return the bounds of the gap, if any, and the events after a seq, read page by page."""
    gap, events = None, list[event_pb2.RunEvent]()
    while True:
        page = await user.ask("ListEvents", run_id=owner.run_id, after_seq=after_seq, events_max=events_max)
        assert len(page.events) <= events_max
        if page.HasField("gap"):
            assert not events, "only the first page has a gap"
            gap, after_seq = (page.gap.from_seq, page.gap.to_seq), page.gap.to_seq
        if not page.events:
            assert after_seq == page.last_seq
            return gap, events
        events += map(event_pb2.RunEvent.FromString, page.events)
        after_seq += len(page.events)
        assert events[-1].seq == after_seq


@pytest.mark.parametrize("seed", range(3))
async def test_every_cut_page_and_trim_returns_single_events(user: User, database: Database, seed: int) -> None:
    """EVT-1: the bounds of the rows do not matter."""
    choose = random.Random(seed)
    owner = await user.start()
    for _ in range(6):
        await owner.commit(events=[output(choose.choice(SIZES)) for _ in range(choose.randint(1, 6))])
    await database.execute("DELETE FROM job_store.outbox")
    whole = (await read_all(user, owner, 0, 1000))[1]
    rows = await bounds(database, owner)
    assert len(rows) < len(whole), "rows have several events"
    trimmed = 0
    for _ in range(8):
        trimmed = choose.randint(trimmed, len(whole))
        await trim(database, owner, trimmed)
        assert await bounds(database, owner) == [row for row in rows if row[1] > trimmed]
        for after_seq in {0, trimmed, max(0, trimmed - 1), choose.randint(0, len(whole))}:
            gap, events = await read_all(user, owner, after_seq, choose.choice([1, 2, 3, 7, 1000]))
            assert gap == ((after_seq + 1, trimmed) if after_seq < trimmed else None)
            assert events == whole[max(after_seq, trimmed) :]


async def test_commit_is_one_row_unless_it_is_large(user: User, database: Database) -> None:
    owner = await user.start()
    await owner.commit(events=[output(1)] * 20)
    assert await bounds(database, owner) == [(1, 2), (3, 3), (4, 23)]
    await owner.commit(events=[output(ROW_BYTES_MAX // 3)] * 5)
    assert (await bounds(database, owner))[3:] == [(24, 25), (26, 27), (28, 28)]


class Stream(JetStreamLifecycle):
    def __init__(self) -> None:
        self.sent: list[Lifecycle] = []

    async def end(self) -> StreamEnd:
        return StreamEnd(poll_number=1, create_time=datetime(2026, 1, 1, tzinfo=UTC), last_seq=10**9)

    async def send(self, events: Sequence[Lifecycle]) -> Mapping[int, int]:
        self.sent += events
        return {event.outbox_id: seq for seq, event in enumerate(events, start=1)}


async def test_life_cycle_gets_single_events_of_rows(user: User, database: Database) -> None:
    """NOTE-2: this includes several events of one row, and rows that a trim has left."""
    owner = await user.start()
    gate = {"state": call_pb2.CALL_STATE_AWAITING_APPROVAL, "approval": {"digest": DIGEST}}
    await owner.commit(events=[output(1)], calls=[owner.call(f"call_{n}", index=n, **gate) for n in range(3)])
    whole = {event.event_id: event for event in (await read_all(user, owner, 0, 1000))[1]}
    await trim(database, owner, len(whole) - 1)
    stream = Stream()
    await PostgresOutbox(database).relay(stream, events_max=100)
    assert len(stream.sent) == 5
    for event in stream.sent:
        assert event_pb2.RunEvent.FromString(event.payload) == whole[event.event_id]


async def test_life_cycle_event_of_a_removed_row_is_dropped(user: User, database: Database) -> None:
    """It is not replaced by an event of a later row."""
    owner = await user.start()
    await database.execute("DELETE FROM job_store.events WHERE run_id = $1 AND first_seq = 1", owner.run_id)
    stream = Stream()
    assert await PostgresOutbox(database).relay(stream, events_max=100) == 2
    assert [event.type for event in stream.sent] == ["run.running"]
    assert await database.fetchval("SELECT count(*) FROM job_store.outbox") == 0
