"""Leases of workers on runs, in database time."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any
from unittest.mock import AsyncMock

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.chassis.ids import StoreId, WorkerId
from pawl.chassis.process.clock import SystemClock
from pawl.errors import LeaseLost, QueueFull, RunNotFound
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.ledger.rules.slots import SlotLimits, StoreSlots
from pawl.job_store.ledger.store.leases import PostgresLeases
from pawl.job_store.ledger.store.upkeep import PostgresLedgerStats
from pawl.job_store.sweeps import watch_clock
from pawl.server.db.database import Database
from tests.rpc.job_store.conftest import Replica, StartReplica
from tests.rpc.job_store.user import Owner, User
from tests.rpc.refusals import raises


async def end_leases(database: Database) -> None:
    await database.execute("UPDATE job_store.runs SET claim_at = now() WHERE claim_at > now()")


def ids(runs: Any) -> list[str]:
    return [run.run_id for run in runs]


async def test_a_claim_includes_the_data_of_few_runs_and_of_first_runs(user: User) -> None:
    async def check(run: pb.ClaimedRun) -> None:
        request = pb.LoadRunRequest(store_id=run.store_id, run_id=run.run_id, epoch=run.epoch)
        (loaded,) = [part async for part in user.stub.LoadRun(request)]
        assert [message.text for message in run.loaded.messages] == ["hello"]
        for each in (loaded, run.loaded):
            each.ClearField("now")
        assert run.loaded == loaded

    await user.submit("hello", conversation_id="c", options={"tool_names": ["look_up"]})
    (run,) = await user.claim()
    await check(run)
    await user.talk("hello", "Hi.", conversation_id="c0")
    for number in range(5):
        await user.submit("hello", conversation_id=f"c{number}")
    second, *firsts = await user.claim(runs_max=8)
    assert (second.HasField("loaded"), len(firsts)) == (False, 4)
    for run in firsts:
        await check(run)


async def test_an_idle_worker_learns_when_the_first_run_or_lease_is_due(user: User) -> None:
    async def wait_seconds(*, idle: bool = True) -> float | None:
        asked = {"worker_id": "w2", "runs_max": 1, "lease_seconds": 10, "background_runs_max": 1, "idle": idle}
        response = await user.ask("ClaimRuns", **asked)
        return response.wait_seconds if response.HasField("wait_seconds") else None

    assert await wait_seconds() is None
    for store, seconds in (("a", 200), ("b", 100), ("c", 300)):
        other = User(user.stub, store_id=store)
        await other.submit()
        await other.claim(lease_seconds=seconds)
    assert 90 < (await wait_seconds() or 0) <= 100
    assert await wait_seconds(idle=False) is None


def weighted(**limits: int) -> StoreSlots:
    """Store a has a weight of 3."""
    return StoreSlots(SlotLimits(**limits), {StoreId("a"): SlotLimits(**limits, weight=3)})


@pytest.mark.parametrize("one_store", [True, False])
@pytest.mark.parametrize(("claims", "runs_max"), [(10, 1), (5, 2), (1, 10)])
async def test_stores_get_turns_by_weight_in_claims_of_any_size(
    user: User, database: Database, claims: int, runs_max: int, one_store: bool
) -> None:
    for store in ("a", "b", "c"):
        for number in range(9):
            await User(user.stub, store_id=store).submit(conversation_id=f"c{number}")
    leases = PostgresLeases(database, weighted(per_store=20, per_user=20), crashes_max=3, one_store=one_store)
    claimed: list[str] = []
    for _ in range(claims):
        found = await leases.claim(WorkerId("w"), runs_max=runs_max, lease_seconds=60, background_runs_max=0)
        claimed += sorted(run.store_id for run in found)
    assert Counter(claimed) == {"a": 6, "b": 2, "c": 2}
    assert runs_max > 1 or "".join(claimed) == "aaabcaaabc"
    # A store at its limit has turns left, but does not end the claim.
    full = PostgresLeases(database, weighted(per_store=8, per_user=7), crashes_max=3, one_store=one_store)
    found = await full.claim(WorkerId("w"), runs_max=20, lease_seconds=60, background_runs_max=0)
    assert {run.store_id for run in found} == {"a", "b", "c"}


@pytest.mark.parametrize(("slots", "runs_max"), [(0, 64), (100, 0)])
async def test_a_claim_does_not_look_again_for_background_runs_that_it_may_not_take(
    user: User, database: Database, monkeypatch: pytest.MonkeyPatch, slots: int, runs_max: int
) -> None:
    for number in range(9):
        await user.submit(conversation_id=f"c{number}")
    await database.execute("UPDATE job_store.runs SET in_background = true")
    limits = StoreSlots(SlotLimits(per_store=20, per_user=20, background_per_store=slots))
    leases = PostgresLeases(database, limits, crashes_max=3)
    pick = AsyncMock(wraps=leases._due_runs.pick)
    monkeypatch.setattr(leases._due_runs, "pick", pick)
    found = await leases.claim(WorkerId("w"), runs_max=8, lease_seconds=60, background_runs_max=runs_max)
    assert (found, pick.await_count) == ([], 1)


@pytest.mark.parametrize("held", [0, 2])
async def test_active_background_runs_that_a_worker_may_not_take_do_not_hide_other_active_runs(
    user: User, database: Database, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    in_background = "UPDATE job_store.runs SET in_background = true"
    for number in range(held):
        await user.submit(conversation_id=f"held{number}")
    await database.execute(in_background)
    leases = PostgresLeases(database, StoreSlots(SlotLimits(per_store=20, per_user=20)), crashes_max=3)
    asked: dict[str, Any] = {"runs_max": 3, "lease_seconds": 60, "background_runs_max": held}
    assert len(await leases.claim(WorkerId("w"), **asked)) == held
    for number in range(9):
        await user.submit(conversation_id=f"c{number}")
    await database.execute(in_background)
    last = (await user.submit(conversation_id="last")).run.run_id
    await database.execute("UPDATE job_store.runs SET state = 2 WHERE worker_id IS NULL")
    pick = AsyncMock(wraps=leases._due_runs.pick)
    monkeypatch.setattr(leases._due_runs, "pick", pick)
    found = [ids(await leases.claim(WorkerId("w"), **asked)) for _ in range(2)]
    assert (found, pick.await_count) == ([[last], []], 2)
    assert len(await leases.claim(WorkerId("w"), **asked | {"background_runs_max": held + 5})) == 3


async def test_a_stopping_worker_hands_over_its_runs_immediately(user: User, owner: Owner) -> None:
    """OPS-5: no other worker waits for the leases to expire."""
    assert (await user.ask("ReleaseWorker", worker_id="w1")).released_count == 1
    await raises(LeaseLost, owner.commit())
    assert ids(await user.claim("w2")) == [owner.run_id]
    assert (await user.ask("ReleaseWorker", worker_id="w1")).released_count == 0


async def test_loading_requires_the_run_and_its_lease(user: User, owner: Owner) -> None:
    await raises(LeaseLost, Owner(user, owner.run_id, 2).load())
    await raises(RunNotFound, Owner(user, "run_none", 1).load())


async def test_runs_become_due_again_after_the_database_clock_goes_back(user: User, database: Database) -> None:
    """Runs of a dead worker become due too. Later leases stay, and repeating the repair is harmless."""
    held, healthy, parked = [await user.start(conversation_id=name) for name in ("held", "healthy", "parked")]
    await parked.park(run_pb2.WAIT_KIND_ANSWER, wake_time=Timestamp(seconds=4_000_000_000))
    queued = (await user.submit(conversation_id="queued")).run.run_id
    later = "UPDATE job_store.runs SET claim_at = now() + interval '130 s' WHERE run_id = ANY($1)"
    await database.execute(later, [held.run_id, queued])
    renewed = "UPDATE job_store.runs SET claim_at = now() + interval '10 s' WHERE run_id = $1"
    await database.execute(renewed, healthy.run_id)
    assert await user.claim("w2", runs_max=4) == []

    leases = PostgresLeases(database, StoreSlots(SlotLimits(per_store=20, per_user=20)), crashes_max=3)
    for _ in range(2):
        await leases.bring_forward(130.0)

    assert set(ids(await user.claim("w2", runs_max=4))) == {held.run_id, queued}
    assert await user.claim("w2", runs_max=4) == []


async def test_new_replica_detects_that_the_database_clock_went_back(user: User, database: Database) -> None:
    """No other replica needs to be running, because the database stores its latest time."""
    queued = (await user.submit()).run.run_id
    leases = PostgresLeases(database, StoreSlots(SlotLimits(per_store=20, per_user=20)), crashes_max=3)
    await database.execute("UPDATE job_store.clock SET seen_time = now() - interval '1 h'")
    await leases.times()
    time, seen_time = await leases.times()
    assert timedelta() <= time - seen_time < timedelta(minutes=59)
    # The clock went back by 130 s.
    await database.execute("UPDATE job_store.clock SET seen_time = seen_time + interval '130 s'")
    await database.execute("UPDATE job_store.runs SET claim_at = claim_at + interval '130 s'")
    assert await user.claim() == []

    sweeping = asyncio.create_task(watch_clock(leases, SystemClock()))
    try:
        while not (claimed := await user.claim()):
            await asyncio.sleep(0.02)
    finally:
        sweeping.cancel()

    assert ids(claimed) == [queued]
    time, seen_time = await leases.times()
    assert seen_time <= time


LIMITS = SlotLimits(per_store=4, per_user=2)


@pytest.fixture
async def limited(start: StartReplica) -> Replica:
    return await start(slots=LIMITS)


async def submit_many(user: User, count: int) -> list[str]:
    return [(await user.submit()).run.run_id for _ in range(count)]


def owners(user: User, claimed: Any) -> list[Owner]:
    return [Owner(user, run.run_id, run.epoch) for run in claimed]


async def test_users_queued_behind_a_user_at_the_limit_get_their_turn(limited: Replica) -> None:
    """There are more such users than one scan of the store covers."""
    hog = User(limited.stub, user_id="hog")
    await submit_many(hog, 12)
    held = await hog.claim(runs_max=20)
    runs: set[str] = set()
    for number in range(30):
        runs.update(await submit_many(User(limited.stub, user_id=f"user{number:02}"), 1))
    served: set[str] = set()
    while claimed := await hog.claim("w2", runs_max=2):
        served.update(ids(claimed))
        for owner in owners(hog, claimed):
            await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
            await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    assert (served, len(held)) == (runs, LIMITS.per_user)


async def test_stores_with_waiting_runs_do_not_delay_other_stores(
    limited: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim of one run also moves on to a store with a free slot, however many others it reads before."""
    monkeypatch.setattr("pawl.job_store.ledger.store.leases._STORES_MAX", 2)
    blocked = [User(limited.stub, store_id=f"a{number}") for number in range(5)]
    for user in blocked:
        await submit_many(user, 3)
    assert len(await blocked[0].claim(runs_max=20)) == 10
    other = User(limited.stub, store_id="b")
    runs = await submit_many(other, 2)
    assert [ids(await other.claim()) for _ in range(3)] == [[runs[0]], [runs[1]], []]


async def test_the_queue_limit_of_a_store_applies_across_replicas(start: StartReplica) -> None:
    """Two job stores that create runs concurrently reject exactly the runs over the limit."""
    users = [User((await start(slots=LIMITS, store_queue_max=10)).stub, user_id=f"user{number}") for number in range(2)]
    outcomes = await asyncio.gather(*(users[number % 2].submit() for number in range(30)), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert (len(refused), {type(error) for error in refused}) == (30 - 10 - LIMITS.per_store, {QueueFull})
    assert "10 runs are already waiting in this store" in str(refused[0])
    await User(users[0].stub, store_id="beta").submit()


async def test_runs_waiting_for_a_slot_are_counted_by_limit(limited: Replica, database: Database) -> None:
    """OPS-2: each waiting run counts towards one limit."""
    for number in range(3):
        await submit_many(User(limited.stub, user_id=f"user{number}"), 3)
    stats = PostgresLedgerStats(database, StoreSlots(LIMITS))
    counts = await stats.count()
    assert (counts["claimable"], counts["over_user_limit"], counts["over_store_limit"]) == (4, 3, 2)
    await User(limited.stub).claim(runs_max=20)
    counts = await stats.count()
    assert (counts["claimable"], counts["over_user_limit"], counts["over_store_limit"]) == (0, 3, 2)
    await end_leases(database)
    assert (await stats.count())["claimable"] == 4


async def test_unreadable_run_can_still_be_claimed(user: User, database: Database) -> None:
    broken = (await user.submit(conversation_id="c")).run.run_id
    good = (await user.submit(conversation_id="d")).run.run_id
    await database.execute("UPDATE job_store.runs SET usage = 'x' WHERE run_id = $1", broken)
    await database.execute("UPDATE job_store.messages SET body = 'x' WHERE run_id = $1", broken)
    claimed = await user.claim(runs_max=2)
    assert {run.run_id: run.HasField("loaded") for run in claimed} == {broken: False, good: True}
