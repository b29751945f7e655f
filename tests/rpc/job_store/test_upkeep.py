"""What the ledger does by itself: forget and count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb

from services.chassis.clock import SystemClock
from services.chassis.database import Database
from services.errors import PawlError, RunNotFound
from services.job_store.adapters.outbox import PostgresOutbox
from services.job_store.adapters.upkeep import PostgresAttic, PostgresCensus
from services.job_store.app.ports import Lifecycle, StreamEnd
from services.job_store.app.sweeps import Retention, RetentionSweep
from tests.rpc.job_store.conftest import PLACES, Replica
from tests.rpc.job_store.user import Owner, User

DAY_SECONDS = 86400.0


async def age(database: Database, table: str, column: str) -> None:
    async with database.acquire() as connection:
        await connection.execute(f"UPDATE job_store.{table} SET {column} = {column} - interval '31 days'")  # noqa: S608


async def count(database: Database) -> dict[str, int]:
    names = ("conversations", "messages", "runs", "calls", "commands", "events", "requests")
    async with database.acquire() as connection:
        return {name: await connection.fetchval(f"SELECT count(*) FROM job_store.{name}") for name in names}  # noqa: S608


def sweep(database: Database) -> RetentionSweep:
    keep = Retention(
        requests_seconds=DAY_SECONDS,
        sent_seconds=DAY_SECONDS,
        events_seconds=7 * DAY_SECONDS,
        conversations_seconds=30 * DAY_SECONDS,
        interval_seconds=600,
    )
    return RetentionSweep(PostgresAttic(database), SystemClock(), keep)


async def test_conversations_are_removed_whole_once_nothing_happens_in_them(user: User, database: Database) -> None:
    owner = await user.start(conversation_id="old", request_id="r1")
    await user.send(owner.run_id, "cmd_1", steer=pb.SteerCommand(text="hi"))
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED, consumed=["cmd_1"])
    await sweep(database).sweep()
    assert (await user.run(owner.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    await age(database, "conversations", "update_time")
    await age(database, "requests", "create_time")
    await user.submit(conversation_id="new")
    await sweep(database).sweep()
    with pytest.raises(RunNotFound):
        await user.run(owner.run_id)
    assert await count(database) == {
        "conversations": 1,
        "messages": 1,
        "runs": 1,
        "calls": 0,
        "commands": 0,
        "events": 2,
        "requests": 0,
    }


async def test_a_conversation_with_an_open_run_is_kept_however_old(user: User, database: Database) -> None:
    """I3."""
    owner = await user.start()
    await owner.park(run_pb2.WAIT_KIND_ANSWER)
    await age(database, "conversations", "update_time")
    await sweep(database).sweep()
    assert (await user.run(owner.run_id)).state == run_pb2.RUN_STATE_WAITING


async def test_the_ledger_is_counted(user: User, database: Database) -> None:
    """OPS-2."""
    await user.start(conversation_id="c1")
    await user.submit(conversation_id="c2")
    counts = await PostgresCensus(database, PLACES).count()
    assert (counts["RUNNING"], counts["QUEUED"], counts["claimable"], counts["outbox"]) == (1, 1, 1, 3)


async def test_operations_and_refusals_are_counted(user: User, replica: Replica) -> None:
    """OPS-2."""
    owner = await user.start()
    with pytest.raises(PawlError):
        await Owner(user, owner.run_id, 99).commit()
    text = replica.metrics.text().decode()
    assert 'refusals_total{reason="LEASE_LOST"} 1.0' in text
    assert "lease_losses_total 1.0" in text
    assert "group_operations_count 3.0" in text


class Deaf:
    """A stream that must not be used."""

    async def end(self) -> StreamEnd | None:
        raise AssertionError("another replica relays")

    async def send(self, events: Sequence[Lifecycle]) -> Mapping[int, int]:
        raise AssertionError("another replica relays")


async def test_one_replica_at_a_time_relays_the_life_cycle(user: User, database: Database) -> None:
    """Two at once would mix up the order."""
    await user.submit()
    async with database.transaction() as connection:
        await connection.fetchval("SELECT pg_advisory_xact_lock(hashtext('job_store.outbox'))")
        assert await PostgresOutbox(database).relay(Deaf(), events_max=10) == 0
    assert (await PostgresCensus(database, PLACES).count())["outbox"] == 1
