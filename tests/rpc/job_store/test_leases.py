"""Leases of workers on runs, in the time of the database."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.chassis.clock import SystemClock
from pawl.chassis.database import Database
from pawl.errors import LeaseLost, RunNotFound
from pawl.event.v1 import event_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.adapters.leases import PostgresLeases
from pawl.job_store.app.sweeps import ClockSweep
from pawl.job_store.domain.places import PlaceLimits
from tests.rpc.job_store.user import Owner, User


async def end_leases(database: Database) -> None:
    """Let the time pass that the leases were given for."""
    async with database.acquire() as connection:
        await connection.execute("UPDATE job_store.runs SET claim_at = now() WHERE claim_at > now()")


async def renew(user: User, worker_id: str = "w1") -> pb.RenewLeasesResponse:
    return await user.ask("RenewLeases", worker_id=worker_id, lease_seconds=30)


def ids(runs: Any) -> list[str]:
    return [run.run_id for run in runs]


async def test_a_run_whose_lease_ended_goes_to_another_worker_and_the_first_is_refused(
    user: User, database: Database
) -> None:
    """I4: takeover."""
    owner = await user.start()
    await owner.commit(loop_state=b"half way")
    await end_leases(database)
    claimed = await user.claim("w2")
    assert [(run.run_id, run.epoch) for run in claimed] == [(owner.run_id, 2)]
    with pytest.raises(LeaseLost):
        await owner.commit(events=[event_pb2.RunEvent(warning=event_pb2.Warning(reason="STALE"))])
    with pytest.raises(LeaseLost):
        await owner.load()
    successor = Owner(user, owner.run_id, 2)
    assert (await successor.load()).loop_state == b"half way"
    await successor.commit(state=run_pb2.RUN_STATE_COMPLETED)
    assert [event.attempt for event in await user.events(owner.run_id)] == [0, 0, 1, 2]


async def test_a_claim_of_few_runs_brings_what_is_loaded_of_them(user: User) -> None:
    await user.submit("hello", conversation_id="c")
    (run,) = await user.claim()
    (loaded,) = [
        part
        async for part in user.stub.LoadRun(
            pb.LoadRunRequest(store_id=run.store_id, run_id=run.run_id, epoch=run.epoch)
        )
    ]
    assert [message.text for message in run.loaded.messages] == ["hello"]
    for each in (loaded, run.loaded):
        each.ClearField("now")
    assert run.loaded == loaded
    for number in range(5):
        await user.submit(conversation_id=f"c{number}")
    many = await user.claim(runs_max=8)
    assert [each.HasField("loaded") for each in many] == [False] * 5


async def test_what_is_too_large_for_a_part_or_has_a_step_does_not_come_with_a_claim(user: User) -> None:
    owner = await user.start("x" * 600_000, conversation_id="c")
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    await user.submit("y" * 600_000, conversation_id="c")
    (run,) = await user.claim()
    assert not run.HasField("loaded")
    owner = await user.start("hello", conversation_id="d")
    await owner.commit(lease_action=pb.LEASE_ACTION_RELEASE)
    (run,) = await user.claim()
    assert not run.HasField("loaded")


async def test_a_run_that_waited_for_a_time_comes_with_its_claim(user: User) -> None:
    """No client holds a call of it; one that waits for people is read once it is held."""
    for conversation, kind in (("time", run_pb2.WAIT_KIND_TIME), ("people", run_pb2.WAIT_KIND_APPROVAL)):
        owner = await user.start("hello", conversation_id=conversation)
        parked: dict[str, Any] = {"state": run_pb2.RUN_STATE_WAITING, "waits": [kind]}
        wake_time = Timestamp(seconds=1)
        await owner.commit(lease_action=pb.LEASE_ACTION_PARK, wake_time=wake_time, loop_state=b"parked", **parked)
        (run,) = await user.claim()
        assert run.HasField("loaded") == (kind == run_pb2.WAIT_KIND_TIME)
        assert not run.HasField("loaded") or run.loaded.loop_state == b"parked"


async def test_single_claims_go_round_the_stores(user: User) -> None:
    for store in ("a", "b", "c"):
        for number in range(2):
            await User(user.stub, store_id=store).submit(conversation_id=f"c{number}")
    assert [(await user.claim())[0].store_id for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


async def test_a_worker_that_stops_hands_its_runs_over_at_once(user: User) -> None:
    """OPS-5."""
    owner = await user.start()
    released = await user.ask("ReleaseWorker", worker_id="w1")
    assert released.released_count == 1
    with pytest.raises(LeaseLost):
        await owner.commit()
    assert ids(await user.claim("w2")) == [owner.run_id]
    again = await user.ask("ReleaseWorker", worker_id="w1")
    assert again.released_count == 0


async def test_loading_needs_the_run_and_its_lease(user: User) -> None:
    owner = await user.start()
    with pytest.raises(LeaseLost):
        await Owner(user, owner.run_id, 2).load()
    with pytest.raises(RunNotFound):
        await Owner(user, "run_none", 1).load()


async def test_what_was_due_is_due_again_after_the_clock_of_the_database_went_back(
    user: User, database: Database
) -> None:
    """Also what a dead worker held; leases that were given or renewed since stay, and a second time does no harm."""
    held, healthy, parked = [await user.start(conversation_id=name) for name in ("held", "healthy", "parked")]
    await parked.park(run_pb2.WAIT_KIND_ANSWER, wake_time=Timestamp(seconds=4_000_000_000))
    queued = (await user.submit(conversation_id="queued")).run.run_id
    async with database.acquire() as connection:
        later = "UPDATE job_store.runs SET claim_at = now() + interval '130 s' WHERE run_id = ANY($1)"
        await connection.execute(later, [held.run_id, queued])
        renewed = "UPDATE job_store.runs SET claim_at = now() + interval '10 s' WHERE run_id = $1"
        await connection.execute(renewed, healthy.run_id)
    assert await user.claim("w2", runs_max=4) == []

    leases = PostgresLeases(database, PlaceLimits(per_store=20, per_user=20), crashes_max=3)
    for _ in range(2):
        await leases.bring_forward(130.0)

    assert set(ids(await user.claim("w2", runs_max=4))) == {held.run_id, queued}
    assert await user.claim("w2", runs_max=4) == []


async def test_a_replica_that_starts_after_the_clock_of_the_database_went_back_notices_it(
    user: User, database: Database
) -> None:
    """No other has to have been there: the database remembers a time that it had before."""
    queued = (await user.submit()).run.run_id
    leases = PostgresLeases(database, PlaceLimits(per_store=20, per_user=20), crashes_max=3)
    async with database.acquire() as connection:
        await connection.execute("UPDATE job_store.clock SET seen_time = now() - interval '1 h'")
        await leases.times()
        time, seen_time = await leases.times()
        assert timedelta() <= time - seen_time < timedelta(minutes=59)
        # It went back by 130 s.
        await connection.execute("UPDATE job_store.clock SET seen_time = seen_time + interval '130 s'")
        await connection.execute("UPDATE job_store.runs SET claim_at = claim_at + interval '130 s'")
    assert await user.claim() == []

    sweeping = asyncio.create_task(ClockSweep(leases, SystemClock()).run())
    try:
        while not (claimed := await user.claim()):
            await asyncio.sleep(0.02)
    finally:
        sweeping.cancel()

    assert ids(claimed) == [queued]
    time, seen_time = await leases.times()
    assert seen_time <= time
