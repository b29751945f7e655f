"""Delegated runs and their jobs over gRPC and in PostgreSQL (TOOL-7)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pawl.chassis.ids import CallId, CallKey, CommandId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.chassis.labels import MAIL_ID
from pawl.errors import RunNotFound
from pawl.event.v1 import call_pb2, message_pb2, run_pb2, waiting_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.tool_registry.ledger import LedgerReads
from tests.rpc.job_store.conftest import Replica, StartReplica
from tests.rpc.job_store.test_background import claimed_jobs, ended, starting_step
from tests.rpc.job_store.user import DIGEST, Owner, User, result
from tests.rpc.refusals import raises

AGENT = run_pb2.WAIT_KIND_AGENT


def delegation_step(owner: Owner, name: str, **fields: Any) -> dict[str, Any]:
    """Return a step that delegates the call `name` to the run `run_<name>`."""
    return {
        "calls": [owner.call(name, call_pb2.CALL_STATE_DELEGATED, child_run_id=f"run_{name}")],
        "delegations": [delegation(name, **fields)],
    }


def delegation(name: str, **fields: Any) -> pb.Delegation:
    values: dict[str, Any] = {"text": "do it", "depth": 1} | fields
    return pb.Delegation(call_id=name, run_id=f"run_{name}", **values)


async def delegating(user: User, owner: Owner, name: str, **fields: Any) -> Owner:
    await owner.park(AGENT, **delegation_step(owner, name, **fields))
    child = await user.take(f"run_{name}")
    await child.commit(state=run_pb2.RUN_STATE_RUNNING)
    return child


async def test_a_run_shows_what_its_descendants_are_waiting_for(user: User, owner: Owner) -> None:
    middle = await delegating(user, owner, "a")
    lowest = await delegating(user, middle, "b", depth=2)
    waiting = lowest.call("c", call_pb2.CALL_STATE_AWAITING_APPROVAL, approval={"digest": DIGEST})
    await lowest.park(run_pb2.WAIT_KIND_APPROVAL, calls=[waiting])

    for run_id in (owner.run_id, middle.run_id, lowest.run_id):
        run = await user.run(run_id)
        assert [(call.run_id, call.call_id) for call in run.pending_calls] == [(lowest.run_id, "c")]
        waits = [run_pb2.WAIT_KIND_APPROVAL, AGENT] if run_id != lowest.run_id else [run_pb2.WAIT_KIND_APPROVAL]
        assert list(run.waits) == waits
    await raises(RunNotFound, User(user.stub, user_id="bob").run(middle.run_id))
    await raises(RunNotFound, User(user.stub, store_id="beta").run(middle.run_id))


async def test_ending_and_cancelling_runs_on_two_replicas_does_not_cause_a_deadlock(start: StartReplica) -> None:
    """Transactions lock calling runs and their child runs in the same order."""
    one, two = await start(), await start()
    users = (User(one.stub), User(two.stub))
    for number in range(8):
        owner = await users[0].start(conversation_id=f"c{number}")
        child = await delegating(users[0], owner, f"a{number}")
        child.user = users[1]
        ended = child.commit(state=run_pb2.RUN_STATE_COMPLETED, output_text="yes")
        await asyncio.gather(ended, users[0].cancel(owner.run_id), return_exceptions=True)
        (claimed,) = await users[0].claim()
        owner.epoch = claimed.epoch
        inbox = await owner.inbox()
        assert [command.WhichOneof("kind") for command in inbox].count("agent_ended") == 1
        settled = owner.call(f"a{number}", call_pb2.CALL_STATE_CANCELLED, child_run_id=child.run_id, result=result())
        consumed = [command.command_id for command in inbox]
        await owner.commit(calls=[settled], consumed=consumed, state=run_pb2.RUN_STATE_CANCELLED)


AWAITING, FAILED = call_pb2.CALL_STATE_AWAITING_APPROVAL, call_pb2.CALL_STATE_FAILED


async def listed(user: User, **fields: Any) -> dict[str, run_pb2.Run]:
    return {run.run_id: run for run in (await user.ask("ListRuns", **fields)).runs}


async def both(user: User, run_id: str) -> list[run_pb2.Run]:
    return [await user.run(run_id), (await listed(user))[run_id]]


async def test_a_waiting_run_shows_the_reason_the_start_time_and_who_may_decide(user: User, owner: Owner) -> None:
    for run in await both(user, owner.run_id):
        assert not run.HasField("waiting"), "it is RUNNING"
        assert (run.HasField("update_time"), run.HasField("progress_time")) == (True, False)
    gated = owner.call("a", AWAITING, index=1, approval={"digest": DIGEST}, arguments_json=b'{"secret": 1}')
    await owner.park(
        run_pb2.WAIT_KIND_APPROVAL,
        calls=[owner.call("b", FAILED, result=result()), gated],
        wake_time={"seconds": 4_000_000_000},
    )
    for run in await both(user, owner.run_id):
        waiting = run.waiting
        assert waiting.reason == waiting_pb2.WAIT_REASON_APPROVAL
        assert waiting.sentence == "It is waiting for an approval of tool."
        assert (list(waiting.call_ids), list(waiting.user_ids)) == (["a"], ["ann"])
        assert list(waiting.roles) == ["admin", "approver"]
        assert waiting.since_time == run.progress_time == run.update_time
        assert waiting.deadline_time.seconds == 4_000_000_000
        assert {(count.state, count.count) for count in run.call_counts} == {(AWAITING, 1), (FAILED, 1)}
    assert (await user.cancel(owner.run_id)).run.state == run_pb2.RUN_STATE_CANCELLING
    for run in await both(user, owner.run_id):
        assert run.waiting.reason == waiting_pb2.WAIT_REASON_STOPPING


@pytest.mark.parametrize(
    ("roles", "names_its_user"), [([], True), (["member"], False), (["member", "approver"], True), (["admin"], True)]
)
async def test_only_users_who_may_decide_are_listed_as_deciders(
    user: User, roles: list[str], names_its_user: bool
) -> None:
    owner = await user.start(user_roles=roles)
    gated = owner.call("a", AWAITING, approval={"digest": DIGEST})
    await owner.park(run_pb2.WAIT_KIND_APPROVAL, calls=[gated], wake_time={"seconds": 4_000_000_000})
    for run in await both(user, owner.run_id):
        assert list(run.waiting.user_ids) == (["ann"] if names_its_user else [])
        assert list(run.waiting.roles) == ["admin", "approver"]


async def test_queued_run_shows_its_position_and_who_is_ahead(user: User) -> None:
    """LOOP-13: the runs ahead are listed in order."""
    first, second, third = [(await user.submit(conversation_id="c")).run.run_id for _ in range(3)]
    for run in await both(user, third):
        assert (run.queue_position, run.waiting.reason) == (2, waiting_pb2.WAIT_REASON_TURN)
        assert list(run.waiting.run_ids) == [first, second]
    for run in await both(user, first):
        assert (run.queue_position, run.waiting.reason) == (0, waiting_pb2.WAIT_REASON_WORKER)


COMPLETED = run_pb2.RUN_STATE_COMPLETED
NOTICE = message_pb2.Message(role=message_pb2.ROLE_NOTICE, text="It has ended.", notices_json=b"[1]")


async def test_notice_is_loaded_and_entered_by_the_delegated_run(user: User, owner: Owner) -> None:
    """ASYNC-5: the root conversation has the notice, but only the delegated run receives it, once."""
    agent = await delegating(user, owner, "a")
    await agent.commit(round=1, **starting_step("b"))
    assert (await user.run("job_b")).reports_to_conversation_id == (await user.run(owner.run_id)).conversation_id
    (job,) = await claimed_jobs(user)
    await ended(job)
    for notices in ((await agent.load()).notices, await agent.notices()):
        assert [(each.run.run_id, each.occasion) for each in notices] == [("job_b", 0)]
    assert await owner.notices() == []
    await agent.commit(messages=[NOTICE], entered_notices=[pb.EnteredNotice(run_id="job_b")])
    assert await agent.notices() == []
    await agent.commit(state=COMPLETED)
    (command,) = await owner.inbox()
    assert (command.agent_ended.run.run_id, list(command.agent_ended.job_ids)) == (agent.run_id, [])
    assert await owner.notices() == []


async def test_message_of_a_delegated_run_reports_waiting_notices(user: User, owner: Owner) -> None:
    """ASYNC-5: the next model call receives them, even if no wake-up arrived."""
    agent = await delegating(user, owner, "a")
    await agent.commit(round=1, **starting_step("b"))
    (job,) = await claimed_jobs(user)
    await ended(job)
    committed = await agent.commit(messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="x")])
    assert committed.commands_pending


async def test_ends_of_jobs_and_of_their_delegated_runs_on_two_replicas_are_reported_once(start: StartReplica) -> None:
    """ASYNC-5: their transactions do not deadlock, and each end reaches the root run exactly once."""
    one, two = await start(), await start()
    users = (User(one.stub), User(two.stub))
    for number in range(8):
        root = await users[0].start(conversation_id=f"c{number}")
        agent = await delegating(users[0], root, f"a{number}")
        await agent.commit(round=1, **starting_step(f"b{number}"))
        (job,) = await claimed_jobs(users[0])
        job.user = users[1]
        await asyncio.gather(ended(job), agent.commit(state=COMPLETED, output_text="yes"))
        (claimed,) = await users[0].claim()
        root.epoch = claimed.epoch
        (command,) = await root.inbox()
        assert list(command.agent_ended.job_ids) in ([], [job.run_id])
        assert [each.run.run_id for each in await root.notices()] == [job.run_id]
        settled = root.call(f"a{number}", call_pb2.CALL_STATE_SUCCEEDED, child_run_id=agent.run_id, result=result())
        await root.commit(calls=[settled], consumed=[command.command_id], state=run_pb2.RUN_STATE_RUNNING)
        await root.commit(messages=[NOTICE], entered_notices=[pb.EnteredNotice(run_id=job.run_id)])
        await root.commit(state=COMPLETED)
        assert await users[0].claim() == [], "no turn starts"


async def test_delegated_models_list_stop_and_read_only_their_own_jobs(
    user: User, replica: Replica, owner: Owner
) -> None:
    await owner.commit(round=1, **starting_step("root"))
    (root_job,) = await claimed_jobs(user)
    agent = await delegating(user, owner, "a")
    step = starting_step("own")
    step["delegations"][0].above.add(run_id=agent.run_id)
    await agent.commit(round=1, **step)
    ledger, store_id, user_id = LedgerReads(replica.channel), StoreId("acme"), UserId("ann")
    callers = {
        run_id: ConversationId((await user.run(run_id)).conversation_id) for run_id in (agent.run_id, owner.run_id)
    }
    assert {
        run_id: [run.run_id for run in await ledger.jobs(store_id, user_id, where, RunId(run_id), ended_max=10)]
        for run_id, where in callers.items()
    } == {agent.run_id: ["job_own"], owner.run_id: ["job_own", "job_root"]}

    for job in (root_job, *await claimed_jobs(user)):
        await job.commit(calls=[job.call(f"{job.run_id}_call", call_pb2.CALL_STATE_FAILED, result=result())], round=1)
    assert {
        (run_id, job_id)
        for run_id, where in callers.items()
        for job_id in ("job_own", "job_root")
        if await ledger.read(CallKey(store_id, CallId(f"{job_id}_call")), user_id, where, RunId(run_id)) is not None
    } == {(agent.run_id, "job_own"), (owner.run_id, "job_own"), (owner.run_id, "job_root")}

    async def stop(run_id: str, job_id: str) -> bool:
        key = RunKey(store_id, RunId(job_id))
        return await ledger.stop_job(key, user_id, callers[run_id], RunId(run_id), CommandId("c1")) is not None

    own = [await stop(agent.run_id, job_id) for job_id in ("job_own", "job_root", agent.run_id)]
    assert own == [True, False, False]
    assert await stop(owner.run_id, "job_root")


async def test_labels_of_the_root_run_are_found_from_all_runs_below_it(user: User, replica: Replica) -> None:
    labels = {MAIL_ID: "<1@example.com>", "customer": "bob"}
    root = await user.start(labels=labels)
    agent = await delegating(user, root, "a", above=[run_pb2.RunAbove(run_id=root.run_id)])
    ledger = LedgerReads(replica.channel)
    for run_id, expected in ((root.run_id, labels), (agent.run_id, labels), ("run_none", {})):
        assert await ledger.labels(RunKey(StoreId("acme"), RunId(run_id))) == expected
