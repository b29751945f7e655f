"""Series that go on for long, on a real database: the last iterations are kept, and what is gone is said (ASYNC-3)."""

from __future__ import annotations

from pawl.chassis.database import Database
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.domain.trimming import ITERATIONS_KEPT
from tests.rpc.job_store.conftest import Replica
from tests.rpc.job_store.test_background import begun, worked
from tests.rpc.job_store.test_erasures import erase, erasing, swept
from tests.rpc.job_store.test_trim import read, stored_events
from tests.rpc.job_store.user import Owner, User, result


async def iterate(job: Owner, first: int, last: int) -> None:
    """Make some iterations: each is begun by a step and ended by the next. Each tenth fails."""
    for number in range(first, last + 1):
        call = {"round": number, "tool_name": "work", "context": call_pb2.EXECUTION_CONTEXT_BACKEND}
        call_id = f"{job.run_id}_{number}"
        await job.commit(round=number, calls=[job.call(call_id, call_pb2.CALL_STATE_RUNNING, attempt=1, **call)])
        state = call_pb2.CALL_STATE_SUCCEEDED if number % 10 else call_pb2.CALL_STATE_FAILED
        outcome = result(is_error=number % 10 == 0)
        await job.commit(calls=[job.call(call_id, state, attempt=1, result=outcome, **call)])


async def rounds(user: User, run_id: str) -> list[int]:
    """The rounds of the calls that are listed."""
    return [call.round for call in (await user.ask("ListCalls", run_id=run_id, page_size=200)).calls]


async def sent(database: Database) -> None:
    """Let the stream have all life-cycle events."""
    async with database.acquire() as connection:
        await connection.execute("DELETE FROM job_store.outbox")


async def series(user: User, database: Database, iterations: int, *, first: int = 1) -> Owner:
    await begun(user, "series")
    (job,) = await worked(user)
    await sent(database)
    await iterate(job, first, iterations)
    return job


async def test_the_last_iterations_are_kept_and_a_gap_stands_for_the_others(user: User, database: Database) -> None:
    """While it goes on; the calls and events that are kept are whole."""
    kept = ITERATIONS_KEPT
    job = await series(user, database, 2 * kept)
    assert await rounds(user, job.run_id) == list(range(1, 2 * kept + 1))
    whole = [*(await read(user, job.run_id)).events]
    assert whole[0].seq == 1, "nothing is removed before there is twice as much as is kept"
    await iterate(job, 2 * kept + 1, 2 * kept + 1)
    assert await rounds(user, job.run_id) == list(range(kept + 1, 2 * kept + 2))

    part = await read(user, job.run_id)
    gap = part.gap
    assert (gap.from_seq, gap.to_seq + 1) == (1, part.events[0].seq)
    begun_rounds = [event.call_changed.call.round for event in part.events if event.HasField("call_changed")]
    assert sorted(set(begun_rounds)) == list(range(kept + 1, 2 * kept + 2))
    assert list(part.events[:50]) == whole[gap.to_seq : gap.to_seq + 50], "what is kept is as it was"
    assert (gap.snapshot.run.trimmed_rounds, gap.snapshot.omitted_call_count) == (kept, kept)
    assert (list(gap.snapshot.calls), gap.snapshot.run.state) == ([], run_pb2.RUN_STATE_RUNNING)
    assert (await read(user, job.run_id, gap.to_seq)).HasField("gap") is False
    assert (await read(user, job.run_id, gap.to_seq - 1)).gap.from_seq == gap.to_seq
    run = await user.run(job.run_id)
    assert (run.trimmed_rounds, run.trimmed_failures) == (kept, kept // 10)


async def test_events_that_no_stream_has_stay_until_it_has_them(user: User, database: Database) -> None:
    """At-least-once holds for what the life cycle tells; watchers have a gap all the same."""
    await begun(user, "series")
    (job,) = await worked(user)
    async with database.acquire() as connection:
        count = "SELECT count(*) FROM job_store.outbox WHERE run_id = $1"
        unsent = await connection.fetchval(count, job.run_id)
    assert unsent
    await iterate(job, 1, 2 * ITERATIONS_KEPT + 1)
    part = await read(user, job.run_id)
    assert part.events[0].seq == part.gap.to_seq + 1
    assert await stored_events(database, job.run_id) == part.last_seq - part.gap.to_seq + unsent
    await sent(database)
    await iterate(job, 2 * ITERATIONS_KEPT + 2, 3 * ITERATIONS_KEPT + 1)
    part = await read(user, job.run_id)
    assert await stored_events(database, job.run_id) == part.last_seq - part.gap.to_seq


async def test_what_was_decided_about_calls_goes_with_them(user: User, database: Database) -> None:
    """Their receipts, too: whoever decides again is told that there is no such call."""
    await begun(user, "series")
    (job,) = await worked(user)
    await sent(database)
    gated = job.call(
        "gated", call_pb2.CALL_STATE_AWAITING_APPROVAL, approval=call_pb2.ApprovalRequest(digest="ab" * 32)
    )
    await job.commit(round=1, calls=[gated])
    await user.decide(job.run_id, "gated", call_pb2.DECISION_KIND_REJECT, "cmd_no")
    gated.state = call_pb2.CALL_STATE_REJECTED
    gated.result.CopyFrom(result("null", is_error=True))
    await job.commit(calls=[gated], consumed=["cmd_no"])
    assert (await user.decide(job.run_id, "gated", call_pb2.DECISION_KIND_REJECT, "cmd_no")).outcome
    await iterate(job, 2, 2 * ITERATIONS_KEPT + 1)
    again = await user.decide(job.run_id, "gated", call_pb2.DECISION_KIND_REJECT, "cmd_no")
    assert again.outcome == pb.COMMAND_OUTCOME_UNKNOWN
    async with database.acquire() as connection:
        assert not await connection.fetchval("SELECT count(*) FROM job_store.commands WHERE run_id = $1", job.run_id)


async def test_the_receipt_of_an_erasure_says_that_there_were_more(replica: Replica, user: User) -> None:
    """What ran had its effects, whether it is kept or not."""
    conversation_id = await begun(user, "series")
    (job,) = await worked(user)
    await iterate(job, 1, 2 * ITERATIONS_KEPT + 1)
    await job.commit(state=run_pb2.RUN_STATE_COMPLETED)
    await erase(replica, conversation_id)
    await swept(erasing(replica, None))
    receipt = await erase(replica, conversation_id)
    below = [left for left in receipt.left_calls if left.run_id == job.run_id]
    assert (below[0].call_id, below[0].tool_name, below[0].HasField("start_time")) == ("", "work", False)
    assert len(below) > 1
