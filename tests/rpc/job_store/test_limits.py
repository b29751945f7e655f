"""LOOP-14: how many runs of a store and of a user are active at once, and how many are queued."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pawl.chassis.bus import Bus
from pawl.chassis.database import Database
from pawl.chassis.metrics import Metrics
from pawl.errors import QueueFull
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.adapters.upkeep import PostgresLedgerStats
from pawl.job_store.domain.places import PlaceLimits
from tests import servers
from tests.poll import until
from tests.rpc.job_store.conftest import Replica, StartReplica
from tests.rpc.job_store.user import Owner, User

LIMITS = PlaceLimits(per_store=4, per_user=2)


@pytest.fixture
async def replica(start: StartReplica) -> Replica:
    """A job store with small limits."""
    return await start(places=LIMITS)


@pytest.fixture
def bob(user: User) -> User:
    return User(user.stub, user_id="bob")


async def submit_many(user: User, count: int) -> list[str]:
    """Messages to conversations of their own; the ids of the runs."""
    return [(await user.submit()).run.run_id for _ in range(count)]


async def end_leases(database: Database) -> None:
    """Let the time pass that the leases were given for."""
    async with database.acquire() as connection:
        await connection.execute("UPDATE job_store.runs SET claim_at = now() WHERE claim_at > now()")


async def active(database: Database) -> Counter[str]:
    """How many runs are active, by user."""
    async with database.acquire() as connection:
        records = await connection.fetch(
            "SELECT user_id FROM job_store.runs WHERE worker_id IS NOT NULL OR state IN (2, 4)"
        )
    return Counter(record["user_id"] for record in records)


def ids(runs: Any) -> list[str]:
    return [run.run_id for run in runs]


def owners(user: User, claimed: Any) -> list[Owner]:
    return [Owner(user, run.run_id, run.epoch) for run in claimed]


async def test_a_user_has_so_many_active_runs_and_the_next_one_begins_when_one_ends(user: User) -> None:
    runs = await submit_many(user, 4)
    first, second = owners(user, await user.claim(runs_max=10))
    assert {first.run_id, second.run_id} == set(runs[:2])
    assert await user.claim("w2", runs_max=10) == []
    assert (await user.run(runs[2])).state == run_pb2.RUN_STATE_QUEUED
    await first.commit(state=run_pb2.RUN_STATE_RUNNING)
    await first.commit(state=run_pb2.RUN_STATE_COMPLETED)
    assert ids(await user.claim("w2", runs_max=10)) == [runs[2]]
    assert await user.claim("w2", runs_max=10) == []


async def test_a_store_has_so_many_active_runs_however_many_users_it_has(replica: Replica, database: Database) -> None:
    users = [User(replica.stub, user_id=f"user{number}") for number in range(6)]
    for user in users:
        await submit_many(user, 2)
    assert len(await users[0].claim(runs_max=20)) == LIMITS.per_store
    assert (await active(database)).total() == LIMITS.per_store
    other = User(replica.stub, store_id="beta")
    runs = await submit_many(other, 1)
    assert ids(await other.claim(runs_max=20)) == runs


async def test_a_user_at_the_limit_holds_up_nobody_else(user: User, bob: User) -> None:
    """However many of his runs are older."""
    await submit_many(user, 40)
    runs = await submit_many(bob, 1)
    assert len(await user.claim()) == 1
    assert len(await user.claim()) == 1
    assert ids(await bob.claim()) == runs
    assert await bob.claim(runs_max=20) == []


async def test_all_users_behind_one_at_the_limit_get_their_turn(replica: Replica) -> None:
    """More of them than one look at the store goes round."""
    hog = User(replica.stub, user_id="hog")
    await submit_many(hog, 12)
    held = await hog.claim(runs_max=20)
    runs: set[str] = set()
    for number in range(30):
        runs.update(await submit_many(User(replica.stub, user_id=f"user{number:02}"), 1))
    served: set[str] = set()
    while claimed := await hog.claim("w2", runs_max=2):
        served.update(ids(claimed))
        for owner in owners(hog, claimed):
            await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
            await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    assert served == runs
    assert len(held) == LIMITS.per_user


async def test_within_the_limits_the_oldest_goes_first(user: User, bob: User) -> None:
    mine, theirs = await submit_many(user, 3), await submit_many(bob, 3)
    assert [ids(await user.claim())[0] for _ in range(4)] == [*mine[:2], *theirs[:2]]


async def test_a_store_whose_runs_must_wait_does_not_hold_up_the_others(replica: Replica) -> None:
    """Also a claim of one run goes on to a store that has a place."""
    blocked = [User(replica.stub, store_id=f"a{number}") for number in range(3)]
    for user in blocked:
        await submit_many(user, 3)
    assert len(await blocked[0].claim(runs_max=20)) == 6
    other = User(replica.stub, store_id="b")
    runs = await submit_many(other, 2)
    assert [ids(await other.claim()) for _ in range(3)] == [[runs[0]], [runs[1]], []]


async def test_a_parked_run_gives_its_place_away_and_waits_for_one_to_go_on(user: User) -> None:
    """LOOP-14 across pause and resume."""
    runs = await submit_many(user, 3)
    first, _ = owners(user, await user.claim(runs_max=10))
    await first.commit(state=run_pb2.RUN_STATE_RUNNING)
    await first.park(run_pb2.WAIT_KIND_ANSWER)
    (third,) = owners(user, await user.claim(runs_max=10))
    assert third.run_id == runs[2]
    await user.send(first.run_id, "cmd_1", steer=pb.SteerCommand(text="go on"))
    assert await user.claim(runs_max=10) == []
    assert (await user.run(first.run_id)).state == run_pb2.RUN_STATE_WAITING
    await third.commit(state=run_pb2.RUN_STATE_RUNNING)
    await third.commit(state=run_pb2.RUN_STATE_COMPLETED)
    assert ids(await user.claim(runs_max=10)) == [first.run_id]


async def test_runs_whose_worker_died_keep_their_places_and_go_on_at_once(
    user: User, bob: User, database: Database
) -> None:
    """I4, I20: also those that had not begun; nobody gets their places meanwhile."""
    await submit_many(user, 3)
    await submit_many(bob, 3)
    first, *others = owners(user, await user.claim("w1", runs_max=10))
    assert len(others) == LIMITS.per_store - 1
    await first.commit(state=run_pb2.RUN_STATE_RUNNING)
    assert await user.claim("w2", runs_max=10) == []
    await end_leases(database)
    again = await user.claim("w2", runs_max=10)
    assert set(ids(again)) == {first.run_id, *(owner.run_id for owner in others)}
    assert await active(database) == {"ann": 2, "bob": 2}
    assert await user.claim("w3", runs_max=10) == []


async def test_a_run_that_is_stopped_is_settled_at_once_also_over_the_limit(user: User) -> None:
    runs = await submit_many(user, 3)
    first, second = owners(user, await user.claim(runs_max=10))
    await first.commit(state=run_pb2.RUN_STATE_RUNNING)
    await first.park(run_pb2.WAIT_KIND_ANSWER)
    (third,) = owners(user, await user.claim(runs_max=10))
    await user.cancel(first.run_id)
    assert ids(await user.claim("w2", runs_max=10)) == [first.run_id]
    await third.commit(state=run_pb2.RUN_STATE_RUNNING)
    await third.commit(state=run_pb2.RUN_STATE_COMPLETED)
    await submit_many(user, 1)
    assert await user.claim("w2", runs_max=10) == [], f"{second.run_id} and {runs[0]} are active"


async def test_job_stores_that_claim_at_once_keep_to_the_limits(start: StartReplica, database: Database) -> None:
    """Atomic: every worker sees the places that others have just taken."""
    stubs = [(await start(places=LIMITS)).stub for _ in range(2)]
    users = [User(stubs[number % 2], user_id=f"user{number}") for number in range(4)]
    left = {run for user in users for run in await submit_many(user, 8)}

    async def work(number: int) -> None:
        user = User(stubs[number % 2])
        while left:
            claimed = await user.claim(f"w{number}", runs_max=3)
            now_active = await active(database)
            assert now_active.total() <= LIMITS.per_store
            assert max(now_active.values(), default=0) <= LIMITS.per_user
            for owner in owners(user, claimed):
                await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
                await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
                left.remove(owner.run_id)

    async with asyncio.timeout(60), asyncio.TaskGroup() as workers:
        for number in range(6):
            workers.create_task(work(number))


async def test_the_queue_of_a_store_takes_so_many_from_all_job_stores_at_once(start: StartReplica) -> None:
    """Exactly: two job stores that create at once refuse what is too much."""
    users = [
        User((await start(places=LIMITS, store_queue_max=10)).stub, user_id=f"user{number}") for number in range(2)
    ]
    outcomes = await asyncio.gather(*(users[number % 2].submit() for number in range(30)), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert len(refused) == 30 - 10 - LIMITS.per_store
    assert {type(error) for error in refused} == {QueueFull}
    assert "10 runs wait in this store already" in str(refused[0])
    await User(users[0].stub, store_id="beta").submit()


async def test_a_full_queue_takes_a_run_when_another_one_has_begun(start: StartReplica) -> None:
    user = User((await start(places=LIMITS, store_queue_max=2)).stub)
    submitted = await user.submit(request_id="r1")
    # As many as there are places, and two that wait for one.
    await submit_many(user, LIMITS.per_store + 1)
    with pytest.raises(QueueFull):
        await user.submit()
    assert (await user.submit(request_id="r1")).run.run_id == submitted.run.run_id, "it creates nothing"
    (owner,) = owners(user, await user.claim())
    with pytest.raises(QueueFull):
        await user.submit()
    await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
    with pytest.raises(QueueFull):
        await user.submit()
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    await user.submit()


async def test_runs_that_only_wait_for_a_worker_fill_no_queue(start: StartReplica) -> None:
    """Starts at the same instant: the places that are free are there for them, too."""
    user = User((await start(places=PlaceLimits(per_store=20, per_user=20), store_queue_max=30)).stub)
    outcomes = await asyncio.gather(*(user.submit() for _ in range(60)), return_exceptions=True)
    assert sum(isinstance(outcome, QueueFull) for outcome in outcomes) == 10


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[servers.NatsServer]:
    folder = tmp_path / "nats"
    folder.mkdir()
    with servers.NatsServer(folder) as server:
        yield server


async def test_a_place_that_is_free_wakes_workers_at_once(start: StartReplica, nats: servers.NatsServer) -> None:
    """Not only at their next poll; and nobody is woken when nobody waits."""
    replica = await start(nats_url=nats.url, places=LIMITS)
    await replica.bus.wait_connected()
    woken: list[object] = []

    async def hear(_subject: str, data: bytes) -> None:
        woken.append(data)

    async with Bus(nats.url, name="listener", metrics=Metrics("listener")) as listener:
        await listener.wait_connected()
        await listener.subscribe("pawl.internal.v1.work", hear)
        await listener.publish_all([], timeout_seconds=5)
        user = User(replica.stub)
        await submit_many(user, 4)
        first, second = owners(user, await user.claim(runs_max=10))

        async def all_heard(count: int) -> None:
            async def is_there() -> bool:
                return len(woken) >= count

            await until(is_there)

        await all_heard(4)
        await first.commit(state=run_pb2.RUN_STATE_RUNNING)
        await first.park(run_pb2.WAIT_KIND_ANSWER)
        await all_heard(5)
        await second.commit(state=run_pb2.RUN_STATE_RUNNING)
        await second.commit(state=run_pb2.RUN_STATE_COMPLETED)
        await all_heard(6)
        for owner in owners(user, await user.claim(runs_max=10)):
            await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
            await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
        await submit_many(User(replica.stub, store_id="beta"), 1)
        await all_heard(7)
        assert len(woken) == 7, "the last two ends left nobody waiting"


async def test_runs_that_wait_for_a_place_are_counted_by_the_limit(replica: Replica, database: Database) -> None:
    """OPS-2."""
    for number in range(3):
        await submit_many(User(replica.stub, user_id=f"user{number}"), 3)
    stats = PostgresLedgerStats(database, LIMITS)
    counts = await stats.count()
    assert (counts["claimable"], counts["over_user_limit"], counts["over_store_limit"]) == (4, 3, 2)
    await User(replica.stub).claim(runs_max=20)
    counts = await stats.count()
    assert (counts["claimable"], counts["over_user_limit"], counts["over_store_limit"]) == (0, 3, 2)
    await end_leases(database)
    assert (await stats.count())["claimable"] == 4
