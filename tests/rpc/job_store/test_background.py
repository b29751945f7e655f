"""Jobs on a real database: their state, their slots, and the notices in their conversation."""

from __future__ import annotations

import asyncio
from typing import Any

from pawl.chassis.ids import CommandId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.chassis.rpc.client import translating
from pawl.errors import InvalidField, QueueFull, RunNotFound
from pawl.event.v1 import call_pb2, conversation_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.ledger.metrics import PrometheusMeter
from pawl.job_store.ledger.rules.slots import SlotLimits
from pawl.job_store.ledger.store.upkeep import PostgresLedgerStats
from pawl.server.process.metrics import Metrics
from pawl.tool_registry.builtin.jobs import state_of
from pawl.tool_registry.ledger import LedgerReads
from tests.rpc.job_store.conftest import SLOTS, Replica, StartReplica
from tests.rpc.job_store.test_conversations import Shared, index_all, listed
from tests.rpc.job_store.test_erasures import MARKER, erase, erasing, everything, sweep_all
from tests.rpc.job_store.user import DIGEST, Owner, User, result
from tests.rpc.refusals import raises

JOB = run_pb2.Job(tool_name="work", arguments_json=b"{}", iterations_max=1, timeout_seconds=60)
COMPLETED = run_pb2.RUN_STATE_COMPLETED


def starting_step(*names: str) -> dict[str, Any]:
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
    return {
        "calls": calls,
        "delegations": jobs,
        "messages": [message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, call_ids=[call.call_id for call in calls])],
    }


async def start_jobs(user: User, *names: str, conversation_id: str = "") -> str:
    owner = await user.start(conversation_id=conversation_id)
    await owner.commit(round=1, **starting_step(*names))
    await owner.commit(state=COMPLETED)
    return owner.conversation_id


async def claimed_jobs(user: User, count: int = 1, worker_id: str = "jobs") -> list[Owner]:
    owners = [user.owner(run.run_id, run.epoch) for run in await user.claim(worker_id, runs_max=count)]
    for owner in owners:
        await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
    return owners


async def ended(job: Owner, output: str = '{"n":7}') -> None:
    await job.commit(state=COMPLETED, output_text=output)


async def test_notice_content_is_visible_only_to_its_user(replica: Replica) -> None:
    """ASYNC-5: in a conversation shared for writing, other users see the notice without its content."""
    ann, bob = User(replica.stub), User(replica.stub, user_id="bob")
    conversation_id = await start_jobs(ann, "mine")
    talk = Shared(ann=ann, bob=bob, conversation_id=conversation_id)
    await talk.share(conversation_pb2.SHARING_WRITE)
    await start_jobs(bob, "theirs", conversation_id=conversation_id)
    jobs = await claimed_jobs(ann, 2)
    active = await talk.begin(ann)
    for job in jobs:
        await ended(job)
    for notices in ((await active.load()).notices, await active.notices()):
        assert [each.run.run_id for each in notices] == ["job_mine"]
    await active.commit(state=COMPLETED)

    first = await ann.take()
    run = (await first.load()).run
    told = {"ann": "job_mine", "bob": "job_theirs"}
    assert [each.run.run_id for each in (await first.load()).notices] == [told[run.user_id]]
    notice = message_pb2.Message(role=message_pb2.ROLE_NOTICE, text="wombat", notices_json=b'["wombat"]')
    entered = [pb.EnteredNotice(run_id=run_id) for run_id in told.values()]
    await first.commit(state=run_pb2.RUN_STATE_RUNNING, messages=[notice], entered_notices=entered)
    await first.commit(state=COMPLETED)
    other = {"ann": bob, "bob": ann}[run.user_id]
    for user in (ann, bob):
        seen = (await talk.shown_messages(user))[-1]
        assert (seen.role, seen.user_id, seen.number) == (message_pb2.ROLE_NOTICE, run.user_id, seen.number)
        assert (seen.text, seen.notices_json) == (("", b"") if user is other else ("wombat", b'["wombat"]'))
    await replica.database.execute("UPDATE job_store.runs SET claim_at = now() WHERE claim_at > now()")
    second = await (await other.take()).load()
    assert [each.run.run_id for each in second.notices] == [told[other.user_id]], "the first turn could not join it"
    assert second.messages[-1].text == ""
    await index_all(replica.database)
    assert await listed(ann, query="wombat") == []


def asks_for(user: User, run_id: str = "run_started", **fields: Any) -> pb.StartJobRequest:
    message = pb.SubmitMessageRequest(
        store_id=user.store_id, user_id=user.user_id, text="work", policy=pb.MESSAGE_POLICY_QUEUE, **fields
    )
    return pb.StartJobRequest(message=message, run_id=run_id, job=JOB, asked_sha256=b"1")


async def test_queue_of_user_started_jobs_is_bounded(start: StartReplica) -> None:
    """ASYNC-7: the limit is exact over all replicas and conversations, and does not apply to users' messages."""
    slots = SlotLimits(per_store=20, per_user=20, background_per_store=2)
    users = [User((await start(slots=slots, store_queue_max=5)).stub, user_id=f"user{number}") for number in (0, 1)]

    async def ask(number: int) -> None:
        user = users[number % 2]
        with translating():
            await user.stub.StartJob(asks_for(user, f"run_{number}", request_id=f"r{number}"))

    outcomes = await asyncio.gather(*map(ask, range(20)), return_exceptions=True)
    refused = [number for number, outcome in enumerate(outcomes) if outcome is not None]
    assert len(refused) == 20 - 5 - 2, outcomes
    assert {type(outcomes[number]) for number in refused} == {QueueFull}
    assert "5 jobs are already waiting in this store: stop some" in str(outcomes[refused[0]])
    await users[0].start("parent")
    await ask(next(number for number in range(20) if number not in refused))
    await raises(QueueFull, ask(refused[0]))
    for job in await claimed_jobs(users[0], 2):
        await ended(job)
    await ask(refused[0])


async def test_running_jobs_of_a_store_are_listed_for_all_its_users(user: User) -> None:
    bob = User(user.stub, user_id="bob")
    for who, name in ((user, "a"), (bob, "b"), (user, "c"), (user, "d")):
        await start_jobs(who, name)
    await user.cancel("job_d")
    await ended({each.run_id: each for each in await claimed_jobs(user, 3)}["job_a"])
    await user.cancel("job_c")
    request = pb.ListJobsRequest(store_id=user.store_id, running_jobs_of_store=True)
    listed = [run.run_id for run in (await user.stub.ListJobs(request)).runs]
    assert listed == ["job_b"]
    for who, job, cause in ((bob, "job_b", run_pb2.STOP_CAUSE_OPERATOR), (user, "job_d", run_pb2.STOP_CAUSE_USER)):
        await who.send(job, "e1", cancel=pb.CancelCommand(cause=cause))
    for command_id, jobs_of_it in (("e1", ["job_b"]), ("e2", []), ("", [])):
        request.stopped_by_command_id = command_id
        listed = [run.run_id for run in (await user.stub.ListJobs(request)).runs]
        assert listed == jobs_of_it, "and those that an operator has stopped"
    request.user_id = "ann"
    await raises(InvalidField, user.stub.ListJobs(request))


async def test_erasing_a_conversation_removes_its_jobs_without_sending_notices(replica: Replica, user: User) -> None:
    owner = await user.start("parent")
    call = owner.call("call_1", call_pb2.CALL_STATE_DETACHED, child_run_id="run_job")
    call.result.content_json = b"{}"
    task = pb.Delegation(
        call_id="call_1",
        run_id="run_job",
        text="work",
        job=run_pb2.Job(tool_name="work", arguments_json=f'"{MARKER}"'.encode()),
    )
    await owner.commit(
        calls=[call], delegations=[task], messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT)]
    )
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    (working,) = await claimed_jobs(user)
    await erase(replica, owner.conversation_id)
    sweep = erasing(replica, None)
    await sweep.sweep()
    (cancel,) = await working.inbox()
    await working.commit(state=run_pb2.RUN_STATE_CANCELLED, consumed=[cancel.command_id])
    assert await user.claim(runs_max=5) == [], "no turn starts"

    await sweep_all(sweep)

    assert MARKER not in await everything(replica.database)


async def test_unread_notices_are_counted_until_a_model_has_answered(replica: Replica, user: User) -> None:
    """OPS-2, ASYNC-5: pending and entered notices are counted, except those of erased conversations."""
    stats, metrics = PostgresLedgerStats(replica.database, SLOTS), Metrics("job_store")
    meter, shown = PrometheusMeter(metrics), metrics.registry.get_sample_value

    async def counted() -> tuple[float | None, ...]:
        meter.ledger_counted(await stats.count())
        return tuple(shown("pawl_job_store_notices", {"state": state}) for state in ("pending", "entered"))

    conversation_id, told = await start_jobs(user, "a", "b"), await start_jobs(user, "c")
    first, second, third = await claimed_jobs(user, 3)
    assert await counted() == (0, 0)
    for job in (first, second, third):
        await ended(job)
    assert await counted() == (3, 0)
    turns = [user.owner(run.run_id, run.epoch) for run in await user.claim(runs_max=2)]
    turn = {(await user.run(each.run_id)).conversation_id: each for each in turns}[conversation_id]
    notice = message_pb2.Message(role=message_pb2.ROLE_NOTICE, text="ended", notices_json=b"[]")
    entered = [pb.EnteredNotice(run_id=each.run_id) for each in (first, second)]
    await turn.commit(state=run_pb2.RUN_STATE_RUNNING, messages=[notice], entered_notices=entered)
    assert await counted() == (1, 2)
    await turn.commit(state=COMPLETED)
    assert await counted() == (1, 0)
    await erase(replica, told)
    assert await counted() == (0, 0)


async def test_jobs_do_not_use_slots_of_interactive_runs(start: StartReplica) -> None:
    """LOOP-14: a user with two slots can use both in addition to jobs.

    Stores and workers have separate limits for jobs.
    """
    user = User((await start(slots=SlotLimits(per_store=2, per_user=2, background_per_store=3))).stub)
    owner = await user.start()
    await owner.commit(round=1, **starting_step(*map(str, range(5))))
    assert len(await claimed_jobs(user, 8)) == 3
    await user.submit()
    (second,) = await user.claim("w2", runs_max=8)
    assert not second.run_id.startswith("job_")
    await owner.commit(state=COMPLETED)

    assert (
        list((await user.ask("ClaimRuns", worker_id="jobs", runs_max=8, lease_seconds=30, background_runs_max=3)).runs)
        == []
    )


SERIES = run_pb2.Job(tool_name="work", arguments_json=b"{}", interval_seconds=60, iterations_max=3)


async def begin(user: User, owner: Owner, name: str) -> None:
    """Let the owner of a run start the job `run_<name>`."""
    call = owner.call(name, call_pb2.CALL_STATE_DETACHED, child_run_id=f"run_{name}", result=result("{}"))
    delegation = pb.Delegation(call_id=name, run_id=f"run_{name}", text="work", job=SERIES)
    await owner.commit(calls=[call], delegations=[delegation])


async def stop(user: User, conversation_id: str, run_id: str, command_id: str = "stop") -> Any:
    return await user.ask("StopJob", conversation_id=conversation_id, run_id=run_id, command_id=command_id)


async def test_a_model_stops_only_jobs_of_its_conversation_and_is_not_notified_of_their_end(
    user: User, owner: Owner
) -> None:
    await begin(user, owner, "a")
    conversation_id, bob, beta = owner.conversation_id, User(user.stub, user_id="bob"), User(user.stub, store_id="beta")
    await raises(
        RunNotFound,
        *(
            stop(who, where, run_id)
            for who, where, run_id in (
                (user, "another", "run_a"),
                (user, conversation_id, owner.run_id),
                (user, conversation_id, "run_none"),
                (bob, conversation_id, "run_a"),
                (beta, conversation_id, "run_a"),
            )
        ),
    )
    assert (await user.run("run_a")).state == run_pb2.RUN_STATE_QUEUED

    stopped = await stop(user, conversation_id, "run_a")
    cancelled = (True, run_pb2.RUN_STATE_CANCELLED, run_pb2.STOP_CAUSE_MODEL)
    assert (stopped.stopped, stopped.run.state, stopped.run.stop_cause) == cancelled
    assert (await stop(user, conversation_id, "run_a")).stopped
    assert not (await stop(user, conversation_id, "run_a", "later")).stopped
    loaded = await owner.load()
    assert (list(loaded.notices), loaded.open_job_count) == ([], 0)


async def test_job_tools_see_the_current_state_of_jobs(user: User, replica: Replica, owner: Owner) -> None:
    for name in "abc":
        await begin(user, owner, name)
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
    where = (StoreId("acme"), UserId("ann"), ConversationId(owner.conversation_id))
    found = await ledger.jobs(*where, RunId(owner.run_id), ended_max=10)
    assert [(run.run_id, state_of(run)) for run in found] == [
        ("run_b", "AWAITING_APPROVAL"),
        ("run_a", "WAITING"),
        ("run_c", "FAILED"),
    ]
    _, beats, failed = found
    assert (beats.job.tool_name, beats.job.interval_seconds, beats.round, beats.output_text) == ("work", 60, 1, "7")
    assert (list(beats.waits), failed.failure.message) == ([run_pb2.WAIT_KIND_TIME], "no such page")

    async def stop(run_id: str) -> tuple[str, bool] | None:
        key = RunKey(where[0], RunId(run_id))
        stopped = await ledger.stop_job(key, where[1], where[2], RunId(owner.run_id), CommandId("c1"))
        return stopped and (state_of(stopped[0]), stopped[1])

    assert (await stop("run_a"), await stop("run_c")) == (("CANCELLING", True), ("FAILED", False))
    assert await stop(owner.run_id) is None
