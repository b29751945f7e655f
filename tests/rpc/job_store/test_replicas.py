"""Several job stores on one database: what they answer together is right."""

from __future__ import annotations

import asyncio

import pytest

from pawl.errors import RequestIdReused
from pawl.event.v1 import run_pb2
from tests.rpc.job_store.conftest import Replica, StartReplica
from tests.rpc.job_store.user import Owner, User


async def two(start: StartReplica) -> tuple[Replica, Replica]:
    return await start(), await start()


async def test_what_a_deployment_fills_in_tells_no_request_from_another(user: User) -> None:
    """I2: a request that is repeated after a deploy with other defaults is the same one."""
    asked = run_pb2.RunOptions(limits=run_pb2.RunLimits(rounds_max=3))
    old, new = run_pb2.RunOptions(model="old"), run_pb2.RunOptions(model="new")
    first = await user.submit(request_id="r1", options=old, asked_options=asked)
    again = await user.submit(request_id="r1", options=new, asked_options=asked)
    assert (again.run.run_id, again.run.options.model) == (first.run.run_id, "old")
    with pytest.raises(RequestIdReused):
        await user.submit(request_id="r1", options=old, asked_options=run_pb2.RunOptions())


async def test_messages_to_a_new_conversation_at_both_replicas_run_one_after_the_other(start: StartReplica) -> None:
    """LOOP-13."""
    users = [User(replica.stub) for replica in await two(start)]
    answers = await asyncio.gather(*(users[number % 2].submit(conversation_id="new") for number in range(6)))
    assert len({answer.run.run_id for answer in answers}) == 6
    order = []
    while claimed := await users[0].claim(runs_max=10):
        assert len(claimed) == 1
        owner = Owner(users[1], claimed[0].run_id, claimed[0].epoch)
        await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
        await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
        order.append(owner.run_id)
    assert sorted(order) == sorted(answer.run.run_id for answer in answers)
    messages = (await users[0].ask("ListMessages", conversation_id="new")).messages
    assert [message.number for message in messages] == list(range(1, 7))
    assert [message.run_id for message in messages] == order
