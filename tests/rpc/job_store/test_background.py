"""Jobs on a real database: where they stand, who has a place, and what their conversation is told."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.chassis.database import Database
from pawl.errors import IllegalTransition
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.adapters.upkeep import PostgresLedgerStats
from pawl.job_store.domain.places import PlaceLimits
from tests.rpc.job_store.conftest import Replica, StartReplica
from tests.rpc.job_store.test_erasures import MARKER, erase, erasing, everything, swept
from tests.rpc.job_store.test_upkeep import age, sweep
from tests.rpc.job_store.user import Owner, User

JOB = run_pb2.Job(tool_name="work", arguments_json=b"{}", iterations_max=1, timeout_seconds=60)
COMPLETED = run_pb2.RUN_STATE_COMPLETED


def begins(*names: str) -> dict[str, Any]:
    """A step that begins jobs."""
    calls = [
        call_pb2.Call(
            call_id=f"call_{name}",
            round=1,
            index=index,
            tool_name="work",
            state=call_pb2.CALL_STATE_DETACHED,
            child_run_id=f"job_{name}",
            result=call_pb2.CallResult(content_json=b"{}"),
        )
        for index, name in enumerate(names)
    ]
    jobs = [pb.Delegation(call_id=f"call_{name}", run_id=f"job_{name}", text="work", job=JOB) for name in names]
    said = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, call_ids=[call.call_id for call in calls])
    return {"calls": calls, "delegations": jobs, "messages": [said]}


async def begun(user: User, *names: str, conversation_id: str = "") -> str:
    """A run that begins jobs and ends; the conversation."""
    owner = await user.start(conversation_id=conversation_id)
    await owner.commit(round=1, **begins(*names))
    await owner.commit(state=COMPLETED)
    return str((await user.run(owner.run_id)).conversation_id)


async def worked(user: User, count: int = 1, worker_id: str = "jobs") -> list[Owner]:
    """Jobs that a worker has begun."""
    owners = [user.owner(run.run_id, run.epoch) for run in await user.claim(worker_id, runs_max=count)]
    for owner in owners:
        await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
    return owners


async def ended(job: Owner, output: str = '{"n":7}') -> None:
    await job.commit(state=COMPLETED, output_text=output)


async def test_the_end_of_a_job_begins_a_turn_that_is_told_of_it_once(user: User) -> None:
    """ASYNC-5: in one transaction; the turn has no message, and nothing is told again."""
    conversation_id = await begun(user, "a", "b")
    first, second = await worked(user, 2)
    await ended(first)
    (claimed,) = await user.claim()
    turn = user.owner(claimed.run_id, claimed.epoch)
    loaded = await turn.load()
    assert (loaded.run.generation, loaded.run.conversation_id) == (1, conversation_id)
    assert [(each.run.run_id, each.occasion, each.run.output_text) for each in loaded.notices] == [
        (first.run_id, 0, '{"n":7}')
    ]
    assert loaded.open_job_count == 1
    await ended(second)
    assert len((await turn.load()).notices) == 2

    notice = message_pb2.Message(role=message_pb2.ROLE_NOTICE, text="ended", notices_json=b"[]")
    entered = [pb.EnteredNotice(run_id=each.run_id) for each in (first, second)]
    await turn.commit(state=run_pb2.RUN_STATE_RUNNING, messages=[notice], entered_notices=entered)
    assert list((await turn.load()).notices) == []
    await turn.commit(state=COMPLETED)
    assert await user.claim() == [], "nothing is left to be told"
    assert (await user.start(conversation_id=conversation_id)).run_id


async def test_what_is_told_while_a_run_ends_begins_a_turn_when_it_has(user: User) -> None:
    """I1: neither is lost, whichever comes first."""
    conversation_id = await begun(user, "a")
    (job,) = await worked(user)
    owner = await user.start(conversation_id=conversation_id)
    await ended(job)
    assert await user.claim() == []
    assert len((await owner.load()).notices) == 1
    await owner.commit(state=COMPLETED)
    (claimed,) = await user.claim()
    assert len((await user.owner(claimed.run_id, claimed.epoch).load()).notices) == 1


@pytest.mark.parametrize("policy", [pb.MESSAGE_POLICY_QUEUE, pb.MESSAGE_POLICY_STEER, pb.MESSAGE_POLICY_REJECT])
async def test_a_message_goes_before_a_turn_that_nobody_has_begun(user: User, policy: Any) -> None:
    conversation_id = await begun(user, "a")
    (job,) = await worked(user)
    await ended(job)
    submitted = await user.submit("and?", conversation_id=conversation_id, policy=policy)
    (claimed,) = await user.claim(runs_max=5)
    assert (claimed.run_id, submitted.steered) == (submitted.run.run_id, False)
    loaded = await user.owner(claimed.run_id, claimed.epoch).load()
    assert (len(loaded.notices), loaded.run.generation) == (1, 0)


async def test_a_message_waits_for_a_turn_that_has_begun(user: User) -> None:
    conversation_id = await begun(user, "a")
    (job,) = await worked(user)
    await ended(job)
    (claimed,) = await user.claim()
    turn = user.owner(claimed.run_id, claimed.epoch)
    submitted = await user.submit("and?", conversation_id=conversation_id, policy=pb.MESSAGE_POLICY_REJECT)
    assert await user.claim() == []
    await turn.commit(state=run_pb2.RUN_STATE_RUNNING)
    await turn.commit(state=COMPLETED)
    assert [run.run_id for run in await user.claim()] == [submitted.run.run_id]


async def test_a_conversation_that_waits_for_a_job_is_kept_however_old(user: User, database: Database) -> None:
    """I1."""
    conversation_id = await begun(user, "a")
    (job,) = await worked(user)
    await age(database, "conversations", "update_time")
    await sweep(database).sweep()
    await ended(job)
    (claimed,) = await user.claim()
    assert (await user.run(claimed.run_id)).conversation_id == conversation_id


async def test_jobs_go_with_it_and_tell_nobody(replica: Replica, user: User) -> None:
    owner = await user.start("parent")
    conversation_id = (await user.run(owner.run_id)).conversation_id
    call = owner.call("call_1", call_pb2.CALL_STATE_DETACHED, child_run_id="run_job")
    call.result.content_json = b"{}"
    job = run_pb2.Job(tool_name="work", arguments_json=f'"{MARKER}"'.encode())
    task = pb.Delegation(call_id="call_1", run_id="run_job", text="work", job=job)
    await owner.commit(
        calls=[call], delegations=[task], messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT)]
    )
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    (claimed,) = await user.claim()
    working = user.owner(claimed.run_id, claimed.epoch)
    await working.commit(state=run_pb2.RUN_STATE_RUNNING)
    await erase(replica, conversation_id)
    sweep = erasing(replica, None)
    await sweep.sweep()
    (cancel,) = await working.inbox()
    await working.commit(state=run_pb2.RUN_STATE_CANCELLED, consumed=[cancel.command_id])
    assert await user.claim(runs_max=5) == [], "no turn begins"

    await swept(sweep)

    assert MARKER not in await everything(replica.database)


async def test_jobs_are_counted(user: User, database: Database) -> None:
    """OPS-2."""
    stats = PostgresLedgerStats(database, PlaceLimits(per_store=9, per_user=9))
    await begun(user, "a", "b", "c")
    await worked(user)
    counts = await stats.count()
    assert (counts["working"], counts["waiting"], counts["late"]) == (1, 2, 0)
    async with database.acquire() as connection:
        await connection.execute("UPDATE job_store.runs SET claim_at = now() - interval '9 s' WHERE run_id = 'job_c'")
    assert (await stats.count())["late"] == 1


async def test_a_conversation_has_ten_open_jobs_and_no_more(user: User) -> None:
    """ASYNC-7, also against an owner that does not count."""
    owner = await user.start()
    await owner.commit(round=1, **begins(*map(str, range(10))))
    with pytest.raises(IllegalTransition):
        await owner.commit(round=2, **begins("more"))
    assert (await owner.load()).open_job_count == 10


async def test_jobs_take_no_place_of_what_people_wait_for(start: StartReplica) -> None:
    """LOOP-14: a user with two places has both of them beside their jobs; a store and a worker have so many jobs."""
    replica: Replica = await start(places=PlaceLimits(per_store=2, per_user=2, background_per_store=3))
    user = User(replica.stub)
    owner = await user.start()
    await owner.commit(round=1, **begins(*map(str, range(5))))
    assert len(await worked(user, 8)) == 3
    await user.submit()
    (second,) = await user.claim("w2", runs_max=8)
    assert not second.run_id.startswith("job_")
    await owner.commit(state=COMPLETED)

    request = pb.ClaimRunsRequest(worker_id="jobs", runs_max=8, lease_seconds=30, background_runs_max=3)
    assert list((await replica.stub.ClaimRuns(request)).runs) == []


async def test_a_worker_keeps_room_for_people(user: User) -> None:
    await begun(user, *map(str, range(5)))
    request = pb.ClaimRunsRequest(worker_id="w", runs_max=8, lease_seconds=30, background_runs_max=2)
    assert len((await user.stub.ClaimRuns(request)).runs) == 2
    assert len((await user.stub.ClaimRuns(request)).runs) == 0
    await user.submit()
    assert len((await user.stub.ClaimRuns(request)).runs) == 1


async def test_a_worker_of_before_gets_neither_jobs_nor_turns(user: User) -> None:
    """I23: it would hold up the one, and drive the other as a run of which the message is missing."""
    await begun(user, "a")
    before = pb.ClaimRunsRequest(worker_id="before", runs_max=8, lease_seconds=30)
    assert list((await user.stub.ClaimRuns(before)).runs) == []
    (job,) = await worked(user)
    await ended(job)
    assert list((await user.stub.ClaimRuns(before)).runs) == []
    (turn,) = await user.claim("now")
    assert (await user.run(turn.run_id)).generation == 1
