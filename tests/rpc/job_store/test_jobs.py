"""Jobs of a conversation: their list, and the stop by the model, over the wire and in PostgreSQL (ASYNC-6)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.chassis.ids import CommandId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.chassis.rpc_client import translating
from pawl.errors import QueueFull, RunNotFound
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.adapters.upkeep import PostgresLedgerStats
from pawl.job_store.domain.places import PlaceLimits
from pawl.tool_registry.adapters.ledger import LedgerReads
from tests.rpc.job_store.conftest import CRASHES_MAX, PLACES, Replica, StartReplica
from tests.rpc.job_store.test_background import begun, ended, worked
from tests.rpc.job_store.test_forks import fork
from tests.rpc.job_store.user import DIGEST, Owner, User, result

JOB = run_pb2.Job(tool_name="work", arguments_json=b"{}", interval_seconds=60, iterations_max=3)


async def begin(user: User, owner: Owner, name: str) -> None:
    """Let the owner of a run begin the job `run_<name>`."""
    fields: dict[str, Any] = {"child_run_id": f"run_{name}", "result": result("{}")}
    call = owner.call(name, call_pb2.CALL_STATE_DETACHED, **fields)
    begun = pb.Delegation(call_id=name, run_id=f"run_{name}", text="work", job=JOB)
    await owner.commit(calls=[call], delegations=[begun])


async def jobs_of(user: User, conversation_id: str) -> list[str]:
    request = pb.ListRunsRequest(store_id="acme", user_id=user.user_id, reports_to_conversation_id=conversation_id)
    with translating():
        return [run.run_id for run in (await user.stub.ListRuns(request)).runs]


async def stop(user: User, conversation_id: str, run_id: str, command_id: str = "stop") -> pb.StopJobResponse:
    request = pb.StopJobRequest(
        store_id=user.store_id,
        user_id=user.user_id,
        conversation_id=conversation_id,
        run_id=run_id,
        command_id=command_id,
    )
    with translating():
        return await user.stub.StopJob(request)


async def conversation_of(user: User, owner: Owner) -> str:
    return (await user.run(owner.run_id)).conversation_id


async def test_the_jobs_of_a_conversation_are_listed_and_no_other_run(user: User) -> None:
    owner = await user.start()
    await begin(user, owner, "a")
    await begin(user, owner, "b")
    conversation_id = await conversation_of(user, owner)
    assert await jobs_of(user, conversation_id) == ["run_b", "run_a"]
    assert await jobs_of(user, "another") == []
    assert await jobs_of(User(user.stub, user_id="bob"), conversation_id) == []


async def test_a_model_stops_jobs_of_its_conversation_only_and_is_not_told_that_they_end(user: User) -> None:
    owner = await user.start()
    await begin(user, owner, "a")
    conversation_id = await conversation_of(user, owner)
    bob, beta = User(user.stub, user_id="bob"), User(user.stub, store_id="beta")
    for who, where, run_id in (
        (user, "another", "run_a"),
        (user, conversation_id, owner.run_id),
        (user, conversation_id, "run_none"),
        (bob, conversation_id, "run_a"),
        (beta, conversation_id, "run_a"),
    ):
        with pytest.raises(RunNotFound):
            await stop(who, where, run_id)
    assert (await user.run("run_a")).state == run_pb2.RUN_STATE_QUEUED

    stopped = await stop(user, conversation_id, "run_a")
    assert (stopped.stopped, stopped.run.state) == (True, run_pb2.RUN_STATE_CANCELLED)
    assert stopped.run.stop_cause == run_pb2.STOP_CAUSE_MODEL
    assert (await stop(user, conversation_id, "run_a")).stopped
    assert not (await stop(user, conversation_id, "run_a", "later")).stopped
    loaded = await owner.load()
    assert (list(loaded.notices), loaded.open_job_count) == ([], 0)


async def test_what_the_user_stops_is_told(user: User) -> None:
    owner = await user.start()
    await begin(user, owner, "a")
    await user.cancel("run_a")
    loaded = await owner.load()
    assert [notice.run.run_id for notice in loaded.notices] == ["run_a"]
    assert not (await stop(user, await conversation_of(user, owner), "run_a")).stopped


async def turn_of(user: User) -> Owner:
    """A turn that a worker has begun, to tell of the end of a job."""
    owner = await user.start()
    await begin(user, owner, "a")
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    (job,) = await user.claim()
    await end(user.owner(job.run_id, job.epoch))
    (turn,) = await user.claim()
    assert turn.run_id not in {owner.run_id, job.run_id}
    return user.owner(turn.run_id, turn.epoch)


async def end(owner: Owner) -> None:
    await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)


async def crash(user: User, owner: Owner) -> None:
    request = pb.ReportCrashRequest(store_id=user.store_id, run_id=owner.run_id, epoch=owner.epoch)
    with translating():
        await user.stub.ReportCrash(request)


async def until_claimed(user: User) -> Any:
    """Return the next run that may be claimed: one whose worker died rests for a moment."""
    async with asyncio.timeout(60):
        while not (claimed := await user.claim()):
            await asyncio.sleep(0.1)
    return claimed[0]


@pytest.mark.parametrize("stops", [True, False])
async def test_a_turn_whose_workers_die_ends_for_the_message_that_waits(user: User, stops: bool) -> None:
    """It is quarantined for a moment only: a worker ends it, or if they die of that, too, the ledger does."""
    turn = await turn_of(user)
    await turn.commit(state=run_pb2.RUN_STATE_RUNNING, calls=[turn.call("open", call_pb2.CALL_STATE_RUNNING)])
    conversation_id = (await user.run(turn.run_id)).conversation_id
    asked = (await user.submit(conversation_id=conversation_id)).run.run_id
    for _ in range(CRASHES_MAX):
        await crash(user, turn)
        claimed = await until_claimed(user)
        assert claimed.run_id == turn.run_id
        turn = user.owner(turn.run_id, claimed.epoch)
    stopped = await user.run(turn.run_id)
    assert (stopped.state, stopped.stop_cause) == (run_pb2.RUN_STATE_CANCELLING, run_pb2.STOP_CAUSE_SUPERSEDED)
    if stops:
        over = turn.call("open", call_pb2.CALL_STATE_CANCELLED, result=result("{}"))
        await turn.commit(state=run_pb2.RUN_STATE_CANCELLED, calls=[over])
    for _ in range(0 if stops else CRASHES_MAX - 1):
        await crash(user, turn)
        turn = user.owner(turn.run_id, (await until_claimed(user)).epoch)
    if not stops:
        await crash(user, turn)
        assert (await user.run(turn.run_id)).state == run_pb2.RUN_STATE_CANCELLED, "no operator is needed"
    assert (await until_claimed(user)).run_id == asked


async def test_a_turn_that_has_not_begun_keeps_nobody_out_of_a_full_store(start: StartReplica) -> None:
    user = User((await start(places=PlaceLimits(per_store=1, per_user=1), store_queue_max=1)).stub)
    owner = await user.start()
    await begin(user, owner, "a")
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    (job,) = await user.claim()
    await end(user.owner(job.run_id, job.epoch))
    await user.submit()
    await user.submit()
    with pytest.raises(QueueFull):
        await user.submit()


async def test_the_gauge_takes_no_paused_job_for_one_that_is_late_or_at_work(user: User, replica: Replica) -> None:
    owner = await user.start()
    for name in ("a", "b"):
        await begin(user, owner, name)
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    by_id = {run.run_id: run.epoch for run in await user.claim(runs_max=2)}
    later = Timestamp()
    later.FromDatetime(datetime.now(UTC) + timedelta(hours=1))
    for run_id, epoch in by_id.items():
        job = user.owner(run_id, epoch)
        await job.commit(state=run_pb2.RUN_STATE_RUNNING)
        ends = {"wake_time": later} if run_id == "run_b" else {}
        await job.park(run_pb2.WAIT_KIND_PAUSED, **ends)
    counts = await PostgresLedgerStats(replica.database, PLACES).count()
    assert (counts["working"], counts["late"]) == (0, 0)


async def test_the_tools_see_jobs_as_they_are(user: User, replica: Replica) -> None:
    owner = await user.start()
    await begin(user, owner, "a")
    await begin(user, owner, "b")
    await begin(user, owner, "c")
    by_id = {run.run_id: run.epoch for run in await user.claim(runs_max=3)}
    waiting, gated = (user.owner(run_id, by_id[run_id]) for run_id in ("run_a", "run_b"))
    await waiting.commit(state=run_pb2.RUN_STATE_RUNNING, round=1, output_text="7")
    await waiting.park(run_pb2.WAIT_KIND_TIME)
    await gated.commit(state=run_pb2.RUN_STATE_RUNNING)
    asked = gated.call("x", call_pb2.CALL_STATE_AWAITING_APPROVAL, approval={"digest": DIGEST})
    await gated.park(run_pb2.WAIT_KIND_APPROVAL, calls=[asked])
    failure = run_pb2.RunFailure(failure_class=run_pb2.FAILURE_CLASS_TOOL, reason="TOOL_ERROR", message="no such page")
    over = user.owner("run_c", by_id["run_c"])
    await over.commit(state=run_pb2.RUN_STATE_RUNNING)
    await over.commit(state=run_pb2.RUN_STATE_FAILED, failure=failure)

    ledger = LedgerReads(replica.channel)
    where = (StoreId("acme"), UserId("ann"), ConversationId(await conversation_of(user, owner)))
    found = await ledger.jobs(*where, ended_max=10)
    assert [(job.job_id, job.state, job.is_over) for job in found] == [
        ("run_b", "AWAITING_APPROVAL", False),
        ("run_a", "WAITING", False),
        ("run_c", "FAILED", True),
    ]
    _, beats, failed = found
    assert (beats.tool, beats.interval_seconds, beats.iterations, beats.result) == ("work", 60, 1, "7")
    assert beats.waits_for_time
    assert failed.error == "no such page"

    async def stop(run_id: str) -> tuple[str, bool] | None:
        key = RunKey(where[0], RunId(run_id))
        stopped = await ledger.stop_job(key, where[1], where[2], CommandId("c1"))
        return stopped and (stopped[0].state, stopped[1])

    assert await stop("run_a") == ("CANCELLING", True)
    assert await stop("run_c") == ("FAILED", False)
    assert await stop(owner.run_id) is None


@pytest.mark.parametrize("is_told", [False, True])
async def test_a_message_that_interrupts_stops_a_turn_and_its_run_answers(user: User, is_told: bool) -> None:
    """ASYNC-5, LOOP-13: what the turn was to tell is told once, to the model of either."""
    conversation_id = await begun(user, "a")
    (job,) = await worked(user)
    await ended(job)
    (claimed,) = await user.claim()
    turn = user.owner(claimed.run_id, claimed.epoch)
    entered: dict[str, Any] = {}
    if is_told:
        told = message_pb2.Message(role=message_pb2.ROLE_NOTICE, notices_json=b"[]")
        entered = {"messages": [told], "entered_notices": [pb.EnteredNotice(run_id=job.run_id)]}
    await turn.commit(state=run_pb2.RUN_STATE_RUNNING, **entered)
    submitted = await user.submit("and?", conversation_id=conversation_id, policy=pb.MESSAGE_POLICY_INTERRUPT)
    (cancel,) = await turn.inbox()
    await turn.commit(state=run_pb2.RUN_STATE_CANCELLED, consumed=[cancel.command_id])
    (following,) = await user.claim(runs_max=5)
    assert following.run_id == submitted.run.run_id
    owner = user.owner(following.run_id, following.epoch)
    assert len((await owner.load()).notices) == (not is_told)


async def test_a_fork_leaves_what_jobs_tell_with_its_original(user: User) -> None:
    """ASYNC-5: also what is told after the fork was made."""
    conversation_id = await begun(user, "a", "b")
    jobs = await worked(user, 2)
    await ended(jobs[0])
    forked = (await fork(user, conversation_id)).conversation_id
    await ended(jobs[1])
    submitted = await user.submit("and?", conversation_id=forked)
    told = {}
    for claimed in await user.claim(runs_max=5):
        loaded = await user.owner(claimed.run_id, claimed.epoch).load()
        told[loaded.run.conversation_id] = (loaded.open_job_count, len(loaded.notices))
    assert submitted.run.conversation_id == forked
    assert told == {conversation_id: (0, 2), forked: (0, 0)}
