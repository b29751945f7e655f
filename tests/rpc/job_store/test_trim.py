"""The rows of a log, cut in pages and trimmed: a typed gap replaces events of runs that ended days ago (EVT-1)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from pawl.chassis.ids import RunId, RunKey, StoreId
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2, message_pb2, run_pb2
from pawl.job_store.ledger.ports import Lifecycle, StreamEnd
from pawl.job_store.ledger.rpc.log_rows import ROW_BYTES_MAX
from pawl.job_store.ledger.rules.trimming import ITERATIONS_KEPT, Trim
from pawl.job_store.ledger.store import upkeep
from pawl.job_store.ledger.store.log_reads import SNAPSHOT_BYTES_MAX
from pawl.job_store.lifecycle.store import PostgresOutbox
from pawl.job_store.lifecycle.stream import JetStreamLifecycle
from pawl.server.db.database import Database
from tests.rpc.job_store.test_background import claimed_jobs, start_jobs
from tests.rpc.job_store.test_upkeep import sweep
from tests.rpc.job_store.user import DIGEST, Owner, User, result


async def age(database: Database, *, days: int = 8) -> None:
    """Make all runs old and publish their lifecycle events."""
    await database.execute(f"UPDATE job_store.runs SET end_time = end_time - interval '{days} days'")  # noqa: S608
    await database.execute("DELETE FROM job_store.outbox")


async def read(user: User, run_id: str, after_seq: int = 0, events_max: int = 1000) -> Any:
    return await user.ask("ListEvents", run_id=run_id, after_seq=after_seq, events_max=events_max)


async def stored_events(database: Database, run_id: str) -> int:
    return int(await database.fetchval("SELECT count(*) FROM job_store.events WHERE run_id = $1", run_id))


def deltas(count: int, text: str = "x") -> list[event_pb2.RunEvent]:
    return [event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text=text)) for _ in range(count)]


async def ended(
    user: User, *, calls: Sequence[call_pb2.Call] = (), texts: Sequence[str] = ("An answer.",), events: int = 5
) -> Owner:
    owner = await user.start("a question")
    await owner.commit(
        events=deltas(events),
        calls=calls,
        messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=text) for text in texts],
    )
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    return owner


def called(call_id: str, content: str, *, index: int = 0) -> call_pb2.Call:
    return call_pb2.Call(
        call_id=call_id,
        state=call_pb2.CALL_STATE_FAILED,
        round=1,
        index=index,
        tool_name="tool",
        arguments_json=b"{}",
        result=result(content),
    )


async def test_watcher_of_an_old_run_gets_a_gap_with_a_snapshot(user: User, database: Database) -> None:
    """EVT-1, I7: the position of the watcher does not matter, and the last event is unchanged."""
    owner = await ended(user, calls=[called("call_1", '"done"')])
    whole = (await read(user, owner.run_id)).events
    await age(database)
    run = await user.run(owner.run_id)
    await sweep(database)
    last = len(whole)
    snapshot = (await read(user, owner.run_id)).gap.snapshot
    for after_seq in range(last - 1):
        part = await read(user, owner.run_id, after_seq)
        assert part.gap == gap_pb2.Gap(run_id=owner.run_id, from_seq=after_seq + 1, to_seq=last - 1, snapshot=snapshot)
        assert (list(part.events), part.last_seq, part.ended) == ([whole[-1]], last, True)
    run.ClearField("call_counts")  # Fields that are read separately
    assert (snapshot.run, [message.text for message in snapshot.messages]) == (run, ["a question", "An answer."])
    assert [(call.call_id, call.result.content_json) for call in snapshot.calls] == [("call_1", b'"done"')]
    assert (snapshot.omitted_message_count, snapshot.omitted_call_count) == (0, 0)
    assert await stored_events(database, owner.run_id) == 1


async def test_only_runs_that_ended_long_ago_are_trimmed(user: User, database: Database) -> None:
    young = await ended(user)
    await age(database, days=6)
    waiting = await user.start()
    await waiting.park(run_pb2.WAIT_KIND_ANSWER)
    before = [await read(user, owner.run_id) for owner in (young, waiting)]
    await sweep(database)
    assert [await read(user, owner.run_id) for owner in (young, waiting)] == before
    await age(database, days=2)
    await sweep(database)
    assert ((await read(user, young.run_id)).HasField("gap"), await read(user, waiting.run_id)) == (True, before[1])


async def test_events_that_subscribers_have_not_received_are_kept(user: User, database: Database) -> None:
    """NOTE-2: the outbox refers to events of the log, which JetStream gets after an outage."""
    owner = await ended(user)
    outbox = await database.fetch("SELECT run_id, seq, event_id, type, time FROM job_store.outbox")
    await age(database)
    for row in outbox:
        await database.execute(
            "INSERT INTO job_store.outbox (store_id, run_id, seq, event_id, type, time)"
            " VALUES ('acme', $1, $2, $3, $4, $5)",
            *row.values(),
        )
    whole = await stored_events(database, owner.run_id)
    await sweep(database)
    assert await stored_events(database, owner.run_id) == whole
    await age(database, days=0)
    await sweep(database)
    assert await stored_events(database, owner.run_id) == 1


async def test_snapshot_is_bounded_and_marks_what_it_omits(user: User, database: Database) -> None:
    """I19: the newest messages and calls are kept. Large results are omitted."""
    large, small = '"' + "r" * 20_000 + '"', '"' + "r" * 15_000 + '"'
    results = [large] + [small] * 60
    texts = ["t" * 200_000] * 5
    owner = await ended(user, calls=[called(f"call_{n}", text, index=n) for n, text in enumerate(results)], texts=texts)
    await age(database)
    await sweep(database)
    snapshot = (await read(user, owner.run_id)).gap.snapshot
    assert snapshot.ByteSize() < 2 * SNAPSHOT_BYTES_MAX + 250_000
    assert ([message.number for message in snapshot.messages], snapshot.omitted_message_count) == ([4, 5, 6], 3)
    shown = [call.index for call in snapshot.calls]
    assert shown == list(range(snapshot.omitted_call_count, 61))
    assert 30 < len(shown) < 61
    few = await ended(user, calls=[called("large", large)])
    await age(database)
    await sweep(database)
    (call,) = (await read(user, few.run_id)).gap.snapshot.calls
    assert not call.HasField("result")
    assert call.result_omitted_bytes > 20_000


async def iterate(job: Owner, first: int, last: int) -> None:
    """Commit iterations, which start in one step and end in the next. Every tenth iteration fails."""
    for number in range(first, last + 1):
        call = {"round": number, "tool_name": "work", "context": call_pb2.EXECUTION_CONTEXT_BACKEND}
        call_id = f"{job.run_id}_{number}"
        await job.commit(round=number, calls=[job.call(call_id, call_pb2.CALL_STATE_RUNNING, attempt=1, **call)])
        state = call_pb2.CALL_STATE_SUCCEEDED if number % 10 else call_pb2.CALL_STATE_FAILED
        await job.commit(calls=[job.call(call_id, state, attempt=1, result=result(is_error=number % 10 == 0), **call)])


async def rounds(user: User, run_id: str) -> list[int]:
    return [call.round for call in (await user.ask("ListCalls", run_id=run_id, page_size=200)).calls]


async def sent(database: Database) -> None:
    await database.execute("DELETE FROM job_store.outbox")


async def series(user: User, database: Database, iterations: int, *, first: int = 1) -> Owner:
    await start_jobs(user, "series")
    (job,) = await claimed_jobs(user)
    await sent(database)
    await iterate(job, first, iterations)
    return job


async def test_trimming_keeps_the_last_iterations_and_leaves_a_gap_for_the_others(
    user: User, database: Database
) -> None:
    """The log is trimmed during the run; retained calls and events are complete."""
    kept = ITERATIONS_KEPT
    job = await series(user, database, 2 * kept)
    assert await rounds(user, job.run_id) == list(range(1, 2 * kept + 1))
    whole = [*(await read(user, job.run_id)).events]
    assert event_pb2.RunEvent.FromString(whole[0]).seq == 1, "nothing is removed below twice the retained amount"
    await iterate(job, 2 * kept + 1, 2 * kept + 1)
    assert await rounds(user, job.run_id) == list(range(kept + 1, 2 * kept + 2))

    part = await read(user, job.run_id)
    gap = part.gap
    events = [event_pb2.RunEvent.FromString(event) for event in part.events]
    assert (gap.from_seq, gap.to_seq + 1) == (1, events[0].seq)
    begun_rounds = [event.call_changed.call.round for event in events if event.HasField("call_changed")]
    assert sorted(set(begun_rounds)) == list(range(kept + 1, 2 * kept + 2))
    assert list(part.events[:50]) == whole[gap.to_seq : gap.to_seq + 50], "retained rows are unchanged"
    assert (gap.snapshot.run.trimmed_rounds, gap.snapshot.omitted_call_count) == (kept, kept)
    assert (list(gap.snapshot.calls), gap.snapshot.run.state) == ([], run_pb2.RUN_STATE_RUNNING)
    assert (await read(user, job.run_id, gap.to_seq)).HasField("gap") is False
    assert (await read(user, job.run_id, gap.to_seq - 1)).gap.from_seq == gap.to_seq
    run = await user.run(job.run_id)
    assert (run.trimmed_rounds, run.trimmed_failures) == (kept, kept // 10)


SIZES = (1, 100, ROW_BYTES_MAX // 3, ROW_BYTES_MAX)
BOUNDS = "SELECT first_seq, last_seq FROM job_store.events WHERE run_id = $1 ORDER BY last_seq"


def output(size: int) -> event_pb2.RunEvent:
    return event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text="x" * size))


async def bounds(database: Database, owner: Owner) -> list[tuple[int, int]]:
    return [(record[0], record[1]) for record in await database.fetch(BOUNDS, owner.run_id)]


async def trim(database: Database, owner: Owner, seq: int) -> None:
    """Trim the log of a run up to `seq`, as in a running series."""
    async with database.transaction() as connection:
        await upkeep.remove(connection, [Trim(run=RunKey(StoreId("acme"), RunId(owner.run_id)), round=0, seq=seq)])
        await connection.execute("UPDATE job_store.runs SET trimmed_log_seq = $2 WHERE run_id = $1", owner.run_id, seq)


async def read_all(
    user: User, owner: Owner, after_seq: int, events_max: int
) -> tuple[tuple[int, int] | None, list[event_pb2.RunEvent]]:
    """Return the bounds of the gap, or None without one, and the events after `after_seq`, read page by page."""
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
    """EVT-1: clients cannot see how the log is divided into rows."""
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


class Stream(JetStreamLifecycle):
    def __init__(self) -> None:
        self.sent: list[Lifecycle] = []

    async def end(self) -> StreamEnd:
        return StreamEnd(poll_number=1, create_time=datetime(2026, 1, 1, tzinfo=UTC), last_seq=10**9)

    async def send(self, events: Sequence[Lifecycle]) -> Mapping[int, int]:
        self.sent += events
        return {event.outbox_id: seq for seq, event in enumerate(events, start=1)}


async def test_the_lifecycle_stream_gets_the_single_events_of_rows(user: User, database: Database) -> None:
    """NOTE-2: a row may contain several events, and may be what a trim has left."""
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


async def test_lifecycle_event_of_a_removed_row_is_dropped(user: User, database: Database) -> None:
    """The event is not replaced by an event of a later row."""
    owner = await user.start()
    await database.execute("DELETE FROM job_store.events WHERE run_id = $1 AND first_seq = 1", owner.run_id)
    stream = Stream()
    assert await PostgresOutbox(database).relay(stream, events_max=100) == 2
    assert [event.type for event in stream.sent] == ["run.running"]
    assert await database.fetchval("SELECT count(*) FROM job_store.outbox") == 0
