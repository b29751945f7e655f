"""Delegated runs, over the wire and in PostgreSQL (TOOL-7)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pawl.errors import RunNotFound
from pawl.event.v1 import call_pb2, run_pb2, waiting_pb2
from pawl.job.v1 import ledger_pb2 as pb
from tests.rpc.job_store.conftest import StartReplica
from tests.rpc.job_store.user import DIGEST, Owner, User, result

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


async def test_run_shows_what_its_descendants_wait_for(user: User, owner: Owner) -> None:
    middle = await delegating(user, owner, "a")
    lowest = await delegating(user, middle, "b", depth=2)
    waiting = lowest.call("c", call_pb2.CALL_STATE_AWAITING_APPROVAL, approval={"digest": DIGEST})
    await lowest.park(run_pb2.WAIT_KIND_APPROVAL, calls=[waiting])

    for run_id in (owner.run_id, middle.run_id, lowest.run_id):
        run = await user.run(run_id)
        assert [(call.run_id, call.call_id) for call in run.pending_calls] == [(lowest.run_id, "c")]
        waits = [run_pb2.WAIT_KIND_APPROVAL, AGENT] if run_id != lowest.run_id else [run_pb2.WAIT_KIND_APPROVAL]
        assert list(run.waits) == waits
    with pytest.raises(RunNotFound):
        await User(user.stub, user_id="bob").run(middle.run_id)
    with pytest.raises(RunNotFound):
        await User(user.stub, store_id="beta").run(middle.run_id)


async def test_ending_and_cancelling_runs_on_two_replicas_does_not_deadlock(start: StartReplica) -> None:
    """Callers and their child runs are locked in one order."""
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


AWAITING = call_pb2.CALL_STATE_AWAITING_APPROVAL
FAILED = call_pb2.CALL_STATE_FAILED


async def listed(user: User, **fields: Any) -> dict[str, run_pb2.Run]:
    return {run.run_id: run for run in (await user.ask("ListRuns", **fields)).runs}


async def both(user: User, run_id: str) -> list[run_pb2.Run]:
    return [await user.run(run_id), (await listed(user))[run_id]]


async def test_waiting_run_shows_the_reason_the_start_time_and_who_may_decide(user: User, owner: Owner) -> None:
    for run in await both(user, owner.run_id):
        assert not run.HasField("waiting"), "it is RUNNING"
        assert run.HasField("update_time")
        assert not run.HasField("progress_time")
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
        assert run.queue_position == 2
        assert run.waiting.reason == waiting_pb2.WAIT_REASON_TURN
        assert list(run.waiting.run_ids) == [first, second]
    for run in await both(user, first):
        assert (run.queue_position, run.waiting.reason) == (0, waiting_pb2.WAIT_REASON_WORKER)
