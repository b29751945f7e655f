"""Leases that a message's sender gets in the transaction that accepts the message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pawl.chassis.db.database import Database
from pawl.errors import InvalidField
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.ledger.rules.slots import SlotLimits
from tests.rpc.job_store.conftest import StartReplica
from tests.rpc.job_store.user import User

DRIVE = pb.FreeDrive(worker_id="w1", lease_seconds=300)


async def granted(user: User, text: str = "hello", **fields: Any) -> bool:
    response = await user.submit(text, **({"drive": DRIVE} | fields))
    assert not response.HasField("claimed") or response.claimed.run_id == response.run.run_id
    return bool(response.HasField("claimed"))


async def loaded(user: User, run: pb.ClaimedRun) -> pb.LoadRunResponse:
    request = pb.LoadRunRequest(store_id=run.store_id, run_id=run.run_id, epoch=run.epoch)
    (part,) = [part async for part in user.stub.LoadRun(request)]
    part.ClearField("now")
    return part


async def test_run_that_can_start_comes_with_its_lease_and_data(user: User) -> None:
    """Both in a new conversation and in one with a history."""
    options = run_pb2.RunOptions(limits=run_pb2.RunLimits(total_tokens_max=100))
    for text in ("hello", "again"):
        response = await user.submit(text, conversation_id="c", options=options, drive=DRIVE)
        run = response.claimed
        assert run.loaded.messages[-1].text == text
        assert run.loaded.HasField("now")
        run.loaded.ClearField("now")
        assert run.loaded == await loaded(user, run)
        assert await user.claim("w2") == []
        owner = user.owner(run.run_id, run.epoch)
        await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
        await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)


async def test_lease_is_not_granted_without_a_drive(user: User) -> None:
    assert not (await user.submit()).HasField("claimed")
    with pytest.raises(InvalidField):
        await user.submit(drive=pb.FreeDrive(worker_id="w1"))


async def test_message_to_a_busy_conversation_gets_no_lease(user: User) -> None:
    assert await granted(user, conversation_id="c")
    for policy in (pb.MESSAGE_POLICY_QUEUE, pb.MESSAGE_POLICY_STEER, pb.MESSAGE_POLICY_INTERRUPT):
        assert not await granted(user, conversation_id="c", policy=policy)


async def test_repeated_request_gets_no_lease(user: User) -> None:
    """The first response may be lost: the worker then gets the run with its next renewal."""
    first = await user.submit(request_id="r1", drive=DRIVE)
    again = await user.submit(request_id="r1", drive=pb.FreeDrive(worker_id="w2", lease_seconds=300))
    assert again.run.run_id == first.run.run_id
    assert first.HasField("claimed")
    assert not again.HasField("claimed")
    renewed = await user.ask("RenewLeases", worker_id="w1", lease_seconds=300)
    assert [(run.run_id, run.epoch) for run in renewed.runs] == [(first.run.run_id, 1)]


async def test_expired_lease_lets_another_worker_claim_the_run(user: User, database: Database) -> None:
    first = await user.submit(drive=DRIVE)
    await database.execute("UPDATE job_store.runs SET claim_at = now()")
    (run,) = await user.claim("w2")
    assert (run.run_id, run.epoch) == (first.run.run_id, first.claimed.epoch + 1)


async def test_leases_are_granted_only_within_the_limits(start: StartReplica) -> None:
    """Also by concurrent messages to two replicas, some of which share a transaction."""
    limits = SlotLimits(per_store=5, per_user=2)
    replicas = [await start(slots=limits) for _ in range(2)]
    users = [User(replica.stub, user_id=name) for replica in replicas for name in ("ann", "bob", "cyd", "dan")]
    found = await asyncio.gather(*(user.submit(drive=DRIVE) for user in users * 4))
    held = [each.claimed.run_id for each in found if each.HasField("claimed")]
    assert len(held) <= limits.per_store
    by_user = {user.user_id: 0 for user in users}
    for user, each in zip(users * 4, found, strict=True):
        by_user[user.user_id] += each.HasField("claimed")
    assert max(by_user.values()) <= limits.per_user
    claimed = await users[0].claim("w2", runs_max=64)
    assert len(held) + len(claimed) == limits.per_store


async def test_message_passes_no_due_run(user: User) -> None:
    waiting = (await user.submit()).run.run_id
    assert not await granted(user)
    assert not await granted(User(user.stub, user_id="bob"))
    assert await granted(User(user.stub, store_id="other"))
    assert [run.run_id for run in await user.claim("w2")] == [waiting]


async def test_message_does_not_wait_for_a_claim(user: User, database: Database) -> None:
    lock = "SELECT pg_advisory_xact_lock(hashtext('job_store.places'), hashtext('acme'))"
    async with database.transaction() as connection:
        await connection.execute(lock)
        assert not await granted(user)
