"""Assumptions of the simulated store about PostgreSQL, checked against the real one (see simulation/store.py).

Also steps that one statement writes, on two replicas: a step whose rows have changed writes nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import timedelta
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import IdSource, RunKey, UserId, WorkerId
from pawl.job_store.ledger.rules.commit import Commit, NewMessage
from pawl.job_store.ledger.rules.events import OwnerEvent
from pawl.job_store.ledger.rules.unit_of_work import RowKeys
from pawl.job_store.ledger.store.loading import load
from pawl.server.db.database import Database
from pawl.values import CallState
from tests.fakes.manual_clock import ManualClock
from tests.ledger.commands import Chooser
from tests.ledger.game import MOVES, game, walk
from tests.ledger.model import LIMITS, Model
from tests.ledger.product import Product
from tests.ledger.stores import MemoryStore, PostgresStore
from tests.simulation.store import Tables
from tests.unit.job_store.world import change, submission

_WALKS = int(os.environ.get("TESTS_EXAMPLES", "5"))
_STEPS = 50
_RACES = 12


@pytest.mark.timeout(3600)
async def test_both_stores_return_the_same_answers_and_hold_the_same_rows(databases: Sequence[Database]) -> None:
    """Each answer, row and byte of the log is compared. `TESTS_EXAMPLES=500` tests longer."""
    for seed in range(_WALKS):
        limits = LIMITS[seed % len(LIMITS)]
        real = PostgresStore(databases[0], limits)
        await real.wipe()
        await walk([MemoryStore(limits), real], seed, _STEPS)


@pytest.mark.timeout(3600)
async def test_concurrent_writes_from_two_replicas_are_serializable(
    databases: Sequence[Database],
) -> None:
    """No update is lost, no seq is repeated or missing, and no run has two workers."""
    for seed in range(_WALKS):
        chance = Random(seed)
        limits = chance.choice(LIMITS)
        one, two = (PostgresStore(database, limits) for database in databases)
        await one.wipe()
        async with game([one], chance.choice) as played, two.open() as commit:
            for _ in range(_RACES):
                await chance.choice(MOVES)(played)
                await played.race(Product(two, commit))
            await played.end_all()
            await played.check_logs()


async def test_a_repeated_request_for_the_last_queue_slot_gets_the_same_run(databases: Sequence[Database]) -> None:
    """I2: the first request does not fill the queue for its own repetition."""
    limits = LIMITS[0] | {"store_queue": 1}
    one, two = (PostgresStore(database, limits) for database in databases)
    async with one.open() as first, two.open() as second:
        for number in range(10):
            await one.wipe()
            choose = Chooser(Model(limits), Random(number).choice)
            ask = choose.submit() | {"request": "r1"}
            copy = ask | {"tag": "copy"}
            answers = await asyncio.gather(Product(one, first).do(ask), Product(two, second).do(copy))
            assert answers[0] == answers[1], answers
            assert answers[0][0] == "ok", answers


async def test_step_locks_conversation_then_run_and_sees_earlier_writes(
    databases: Sequence[Database],
) -> None:
    """I7: therefore, two groups never deadlock, and no group continues from a stale read."""
    store = PostgresStore(databases[0], LIMITS[0])
    await store.wipe()
    async with game([store], Random(1).choice):
        (run,) = (await store.tables()).runs
    keys = RowKeys(runs=(run,), conversations_of=(run,), commands_of=(run,))
    async with databases[0].acquire() as before, databases[1].transaction() as connection:
        async with before.transaction():
            await before.execute("UPDATE job_store.conversations SET last_number = last_number + 7")
            waits = asyncio.create_task(load(connection, IdSource(ManualClock()), [keys]))
            await waits_for_lock(before, waits)
            await before.execute("UPDATE job_store.runs SET last_seq = last_seq + 100")
        unit = await waits
        newest = await before.fetch("SELECT last_seq, last_number FROM job_store.runs, job_store.conversations")
        assert [row.last_seq for _, row in unit.runs.items()] == [record["last_seq"] for record in newest]
        assert [row.last_number for _, row in unit.conversations.items()] == [
            record["last_number"] for record in newest
        ]


_CHANGES = {
    "run": "UPDATE job_store.runs SET crashes = crashes WHERE run_id = $1",
    "messages": "UPDATE job_store.conversations SET last_number = last_number + 1 WHERE active_run_id = $1",
    "queue": "UPDATE job_store.conversations SET queue = 'run_x' WHERE active_run_id = $1",
    "user": "UPDATE job_store.conversations SET user_id = '' WHERE active_run_id = $1",
    "nothing": "SELECT 1 FROM job_store.runs WHERE run_id = $1 FOR UPDATE",
    "search": "UPDATE job_store.conversations SET searched_number = 1 WHERE active_run_id = $1",
}


@pytest.fixture
async def store(databases: tuple[Database, Database]) -> PostgresStore:
    store = PostgresStore(databases[0], LIMITS[0])
    await store.wipe()
    return store


async def claimed(store: PostgresStore) -> list[tuple[RunKey, int]]:
    """Two runs in separate conversations. A worker holds the runs, and the replica knows their rows."""
    for user in ("ann", "bob"):
        await store.journal.write([submission(conversation_id=f"of-{user}", user_id=UserId(user), message=b"")])
    claims = await store.leases.claim(WorkerId("w1"), runs_max=2, lease_seconds=30.0, background_runs_max=1)
    assert len(claims) == 2
    for claim in claims:
        await store.reads.load(RunKey(claim.store_id, claim.run_id), claim.epoch)
    return sorted((RunKey(claim.store_id, claim.run_id), claim.epoch) for claim in claims)


def step(run: RunKey, epoch: int, number: int, **fields: Any) -> Commit:
    values = {
        "events": (OwnerEvent(type="output.delta", body=b""),),
        "messages": (NewMessage(message_id=f"m{run.run_id}{number}", summarised_to=0, body=b""),),
        "calls": (change(f"call{run.run_id}{number}", CallState.RUNNABLE),),
        "loop_state": b"%d" % number,
    }
    return Commit(run=run, epoch=epoch, commit_id=f"c{number}", **(values | fields))


async def waits_for_lock(connection: Any, task: asyncio.Task[Any]) -> None:
    while not await connection.fetchval("SELECT bool_or(NOT granted) FROM pg_locks"):
        assert not task.done()


@pytest.mark.parametrize("changed", _CHANGES)
async def test_a_step_that_waited_and_lost_does_not_write_anything(
    store: PostgresStore, databases: tuple[Database, Database], changed: str
) -> None:
    """I4, I7: rows that the step had read may have changed. The other step of the statement is written."""
    (lost, epoch), (other, other_epoch) = await claimed(store)
    before = await store.tables()
    steps = [step(lost, epoch, 1), step(other, other_epoch, 1)]
    async with databases[1].acquire() as connection:
        async with connection.transaction():
            await connection.execute(_CHANGES[changed], lost.run_id)
            task = asyncio.create_task(store.journal.write_steps(steps))
            await waits_for_lock(connection, task)
        written = await task

    is_written = changed in {"nothing", "search"}
    assert [outcome is not None for outcome in written.outcomes] == [is_written, True]
    assert {row.run_id for row in written.events} == {other.run_id, *([lost.run_id] if is_written else [])}
    after = await store.tables()
    assert (after.runs[lost] != before.runs[lost]) is is_written
    for table in ("messages", "calls", "events", "loop_states"):
        assert (of_run(after, table, lost) != of_run(before, table, lost)) is is_written, table
    assert after.runs[other].last_commit == written.outcomes[1]


async def test_a_step_that_waited_for_a_second_is_left_to_the_transaction(store: PostgresStore) -> None:
    """I14: the times of this step and of later ones would be early."""
    (run, epoch), _ = await claimed(store)
    await store.pass_time(5.0)
    store.cache.note_time(await store.now() - timedelta(seconds=1))
    assert not await is_written(store, step(run, epoch, 1))
    assert (await store.tables()).runs[run].last_commit is None


def of_run(tables: Tables, table: str, run: RunKey) -> list[Any]:
    """Return the rows of a table that name the run or its conversation in their key or fields."""
    return [(key, row) for key, row in getattr(tables, table).items() if run.run_id in repr((key, row))]


async def test_step_is_left_to_the_transaction_once_another_replica_has_written(
    store: PostgresStore, databases: tuple[Database, Database]
) -> None:
    (run, epoch), _ = await claimed(store)
    other = PostgresStore(databases[1], LIMITS[0])
    assert await is_written(store, step(run, epoch, 1))
    await other.journal.write([step(run, epoch, 2)])
    assert not await is_written(store, step(run, epoch, 3))
    await store.journal.write([step(run, epoch, 3)])
    assert await is_written(store, step(run, epoch, 4))


async def test_no_cached_run_is_trusted_after_the_server_restarted(store: PostgresStore) -> None:
    """Transaction ids, and therefore versions, may repeat after a restart or failover."""
    (run, epoch), _ = await claimed(store)
    cached = store.cache.get(run)
    assert cached is not None
    version, server_start = cached.version
    store.cache.put(replace(cached, version=(version, server_start - timedelta(days=1))))
    assert not await is_written(store, step(run, epoch, 1))


async def is_written(store: PostgresStore, commit: Commit) -> bool:
    (outcome,) = (await store.journal.write_steps([commit])).outcomes
    return outcome is not None
