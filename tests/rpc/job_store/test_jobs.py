"""Jobs of a conversation: their list, and the stop by the model, over the wire and in PostgreSQL (ASYNC-6)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.chassis.ids import CommandId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.errors import RunNotFound
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.adapters.upkeep import PostgresLedgerStats
from pawl.tool_registry.adapters.ledger import LedgerReads
from tests.rpc.job_store.conftest import PLACES, Replica
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
    return [run.run_id for run in (await user.ask("ListRuns", reports_to_conversation_id=conversation_id)).runs]


async def stop(user: User, conversation_id: str, run_id: str, command_id: str = "stop") -> pb.StopJobResponse:
    return await user.ask("StopJob", conversation_id=conversation_id, run_id=run_id, command_id=command_id)


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
    await gated.park(
        run_pb2.WAIT_KIND_APPROVAL,
        calls=[gated.call("x", call_pb2.CALL_STATE_AWAITING_APPROVAL, approval={"digest": DIGEST})],
    )
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
