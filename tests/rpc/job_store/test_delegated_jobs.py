"""Jobs of delegated runs on a real database."""

from __future__ import annotations

import asyncio

from pawl.chassis.ids import CallId, CallKey, CommandId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.chassis.labels import MAIL_ID
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.tool_registry.ledger import LedgerReads
from tests.rpc.job_store.conftest import Replica, StartReplica
from tests.rpc.job_store.test_background import claimed_jobs, ended, starting_step
from tests.rpc.job_store.test_delegation import delegating
from tests.rpc.job_store.user import Owner, User, result

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


async def test_stop_of_a_job_reaches_the_jobs_of_its_agent(user: User, owner: Owner) -> None:
    """ASYNC-6: also a job that no worker has claimed yet."""
    await owner.commit(round=1, **starting_step("outer"))
    (outer,) = await claimed_jobs(user)
    agent = await delegating(user, outer, "a")
    await agent.commit(round=1, **starting_step("b", "c"))
    (begun,) = await claimed_jobs(user)
    await user.cancel(outer.run_id)
    (claimed,) = [run for run in await user.claim(runs_max=8) if run.run_id == outer.run_id]
    outer.epoch = claimed.epoch
    settled = outer.call("a", call_pb2.CALL_STATE_CANCELLED, child_run_id=agent.run_id, result=result())
    consumed = [command.command_id for command in await outer.inbox()]
    await outer.commit(calls=[settled], consumed=consumed)
    for run_id in (agent.run_id, "job_b", "job_c"):
        run = await user.run(run_id)
        assert (run.state, run.stop_cause) == (run_pb2.RUN_STATE_CANCELLING, run_pb2.STOP_CAUSE_PARENT), run_id
    (command,) = await begun.inbox()
    assert command.cancel.cause == run_pb2.STOP_CAUSE_PARENT
    assert not (await user.run(owner.run_id)).stop_cause


async def test_message_of_a_delegated_run_reports_waiting_notices(user: User, owner: Owner) -> None:
    """ASYNC-5: the next model call receives them, even if no wake-up arrived."""
    agent = await delegating(user, owner, "a")
    await agent.commit(round=1, **starting_step("b"))
    (job,) = await claimed_jobs(user)
    await ended(job)
    committed = await agent.commit(messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="x")])
    assert committed.commands_pending


async def test_ends_of_jobs_and_their_delegated_runs_on_two_replicas_are_reported_once(start: StartReplica) -> None:
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
        succeeded = call_pb2.CALL_STATE_SUCCEEDED
        settled = root.call(f"a{number}", succeeded, child_run_id=agent.run_id, result=result())
        await root.commit(calls=[settled], consumed=[command.command_id], state=run_pb2.RUN_STATE_RUNNING)
        entered = [pb.EnteredNotice(run_id=job.run_id)]
        await root.commit(messages=[NOTICE], entered_notices=entered)
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
    listed = {
        run_id: [run.run_id for run in await ledger.jobs(store_id, user_id, where, RunId(run_id), ended_max=10)]
        for run_id, where in callers.items()
    }
    assert listed == {agent.run_id: ["job_own"], owner.run_id: ["job_own", "job_root"]}

    for job in (root_job, *await claimed_jobs(user)):
        call = job.call(f"{job.run_id}_call", call_pb2.CALL_STATE_FAILED, result=result())
        await job.commit(calls=[call], round=1)
    read = {
        (run_id, job_id)
        for run_id, where in callers.items()
        for job_id in ("job_own", "job_root")
        if await ledger.read(CallKey(store_id, CallId(f"{job_id}_call")), user_id, where, RunId(run_id)) is not None
    }
    assert read == {(agent.run_id, "job_own"), (owner.run_id, "job_own"), (owner.run_id, "job_root")}

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
