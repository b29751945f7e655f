"""Assumptions of the simulated store about PostgreSQL, checked against the real one (see simulation/store.py)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from random import Random

import pytest

from pawl.chassis.db.database import Database
from pawl.chassis.ids import IdSource
from pawl.job_store.ledger.rules.unit_of_work import RowKeys
from pawl.job_store.ledger.store.loading import load
from tests.fakes.manual_clock import ManualClock
from tests.ledger.commands import Chooser
from tests.ledger.game import MOVES, game, walk
from tests.ledger.model import LIMITS, Model
from tests.ledger.product import Product
from tests.ledger.stores import MemoryStore, PostgresStore

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


async def test_repeated_request_for_the_last_queue_slot_gets_the_same_run(databases: Sequence[Database]) -> None:
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
            while not await before.fetchval("SELECT bool_or(NOT granted) FROM pg_locks"):
                assert not waits.done()
            await before.execute("UPDATE job_store.runs SET last_seq = last_seq + 100")
        unit = await waits
        newest = await before.fetch("SELECT last_seq, last_number FROM job_store.runs, job_store.conversations")
        assert [row.last_seq for _, row in unit.runs.items()] == [record["last_seq"] for record in newest]
        assert [row.last_number for _, row in unit.conversations.items()] == [
            record["last_number"] for record in newest
        ]
