"""The log of a run that ended some days ago begins at its last event; a typed gap stands for the rest (EVT-1)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pawl.chassis.database import Database
from pawl.errors import RunNotFound, SeqBeyondEnd
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.adapters.log_reads import SNAPSHOT_BYTES_MAX
from pawl.job_store.adapters.retention import PostgresRetention
from tests.rpc.job_store.conftest import DAY_SECONDS
from tests.rpc.job_store.test_upkeep import sweep
from tests.rpc.job_store.user import Owner, User, result


async def age(database: Database, *, days: int = 8) -> None:
    """Let all runs have ended so long ago, and the stream have their life-cycle events."""
    async with database.acquire() as connection:
        await connection.execute(f"UPDATE job_store.runs SET end_time = end_time - interval '{days} days'")  # noqa: S608
        await connection.execute("DELETE FROM job_store.outbox")


async def read(user: User, run_id: str, after_seq: int = 0, events_max: int = 1000) -> pb.ListEventsResponse:
    return await user.ask("ListEvents", run_id=run_id, after_seq=after_seq, events_max=events_max)


async def stored_events(database: Database, run_id: str) -> int:
    async with database.acquire() as connection:
        count = await connection.fetchval("SELECT count(*) FROM job_store.events WHERE run_id = $1", run_id)
    return int(count)


def deltas(count: int, text: str = "x") -> list[event_pb2.RunEvent]:
    return [event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text=text)) for _ in range(count)]


async def ended(
    user: User, *, calls: Sequence[call_pb2.Call] = (), texts: Sequence[str] = ("An answer.",), events: int = 5
) -> Owner:
    """Let a run say something, do some calls and complete."""
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


async def test_a_watcher_of_an_old_run_gets_a_gap_with_what_the_events_had_led_to(
    user: User, database: Database
) -> None:
    """EVT-1, I7: wherever it attaches; the last event is there as it was."""
    owner = await ended(user, calls=[called("call_1", '"done"')])
    whole = (await read(user, owner.run_id)).events
    await age(database)
    run = await user.run(owner.run_id)
    await sweep(database).sweep()
    last = len(whole)
    snapshot = (await read(user, owner.run_id)).gap.snapshot
    for after_seq in range(last - 1):
        part = await read(user, owner.run_id, after_seq)
        assert part.gap == gap_pb2.Gap(run_id=owner.run_id, from_seq=after_seq + 1, to_seq=last - 1, snapshot=snapshot)
        assert (list(part.events), part.last_seq, part.ended) == ([whole[-1]], last, True)
    run.ClearField("call_counts")  # Those that are read beside it.
    assert snapshot.run == run
    assert [message.text for message in snapshot.messages] == ["a question", "An answer."]
    assert [(call.call_id, call.result.content_json) for call in snapshot.calls] == [("call_1", b'"done"')]
    assert (snapshot.omitted_message_count, snapshot.omitted_call_count) == (0, 0)
    assert await stored_events(database, owner.run_id) == 1


async def test_behind_the_gap_all_is_as_before(user: User, database: Database) -> None:
    owner = await ended(user)
    last = (await user.run(owner.run_id)).last_seq
    at_end = [await read(user, owner.run_id, last - 1), await read(user, owner.run_id, last)]
    await age(database)
    await sweep(database).sweep()
    assert [await read(user, owner.run_id, last - 1), await read(user, owner.run_id, last)] == at_end
    with pytest.raises(SeqBeyondEnd):
        await read(user, owner.run_id, last + 1)
    with pytest.raises(RunNotFound):
        await read(User(user.stub, user_id="bob"), owner.run_id)


async def test_only_runs_that_ended_long_ago_are_trimmed(user: User, database: Database) -> None:
    young = await ended(user)
    await age(database, days=6)
    waiting = await user.start()
    await waiting.park(run_pb2.WAIT_KIND_ANSWER)
    before = [await read(user, owner.run_id) for owner in (young, waiting)]
    await sweep(database).sweep()
    assert [await read(user, owner.run_id) for owner in (young, waiting)] == before
    await age(database, days=2)
    await sweep(database).sweep()
    assert (await read(user, young.run_id)).HasField("gap")
    assert await read(user, waiting.run_id) == before[1]


async def test_events_that_subscribers_do_not_have_yet_are_kept(user: User, database: Database) -> None:
    """NOTE-2: the outbox names events of the log; however long JetStream is away, it gets them."""
    owner = await ended(user)
    async with database.acquire() as connection:
        outbox = await connection.fetch("SELECT run_id, seq, event_id, type, time FROM job_store.outbox")
        await age(database)
        for row in outbox:
            await connection.execute(
                "INSERT INTO job_store.outbox (store_id, run_id, seq, event_id, type, time)"
                " VALUES ('acme', $1, $2, $3, $4, $5)",
                *row.values(),
            )
    whole = await stored_events(database, owner.run_id)
    await sweep(database).sweep()
    assert await stored_events(database, owner.run_id) == whole
    await age(database, days=0)
    await sweep(database).sweep()
    assert await stored_events(database, owner.run_id) == 1


async def test_little_is_removed_at_a_time(user: User, database: Database) -> None:
    """So many events in all, but one run at least; the longest ended first."""
    owners = [await ended(user, events=20) for _ in range(3)]
    await age(database)
    retention = PostgresRetention(database)
    trimmed: list[Owner] = []
    for events_max in (1, 1000):
        assert await retention.trim_logs(older_than_seconds=DAY_SECONDS, events_max=events_max) == len(trimmed) + 1
        trimmed = [owner for owner in owners if await stored_events(database, owner.run_id) == 1]
        assert trimmed == owners[: len(trimmed)]
    assert trimmed == owners
    assert await retention.trim_logs(older_than_seconds=DAY_SECONDS, events_max=1000) == 0


async def test_a_snapshot_is_bounded_and_says_what_it_leaves_out(user: User, database: Database) -> None:
    """I19: the newest come first; large results are left out."""
    large, small = '"' + "r" * 20_000 + '"', '"' + "r" * 15_000 + '"'
    results = [large] + [small] * 60
    texts = ["t" * 200_000] * 5
    owner = await ended(user, calls=[called(f"call_{n}", text, index=n) for n, text in enumerate(results)], texts=texts)
    await age(database)
    await sweep(database).sweep()
    snapshot = (await read(user, owner.run_id)).gap.snapshot
    assert snapshot.ByteSize() < 2 * SNAPSHOT_BYTES_MAX + 250_000
    assert [message.number for message in snapshot.messages] == [4, 5, 6]
    assert snapshot.omitted_message_count == 3
    shown = [call.index for call in snapshot.calls]
    assert shown == list(range(snapshot.omitted_call_count, 61))
    assert 30 < len(shown) < 61
    few = await ended(user, calls=[called("large", large)])
    await age(database)
    await sweep(database).sweep()
    (call,) = (await read(user, few.run_id)).gap.snapshot.calls
    assert not call.HasField("result")
    assert call.result_omitted_bytes > 20_000


async def test_a_trimmed_run_goes_with_its_conversation(user: User, database: Database) -> None:
    owner = await ended(user)
    await age(database)
    await sweep(database).sweep()
    async with database.acquire() as connection:
        await connection.execute("UPDATE job_store.conversations SET update_time = update_time - interval '31 days'")
    await sweep(database).sweep()
    with pytest.raises(RunNotFound):
        await read(user, owner.run_id)
    assert await stored_events(database, owner.run_id) == 0
