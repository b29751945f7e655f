"""What the ledger does by itself: forget and count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from pawl.chassis.clock import SystemClock
from pawl.chassis.database import Database
from pawl.chassis.ids import IdSource
from pawl.errors import ConversationNotFound, DependencyUnavailable, PawlError, RunNotFound
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.adapters.journal import PostgresJournal
from pawl.job_store.adapters.outbox import PostgresOutbox
from pawl.job_store.adapters.retention import PostgresRetention
from pawl.job_store.adapters.upkeep import PostgresLedgerStats
from pawl.job_store.app.ports import Lifecycle, StreamEnd
from pawl.job_store.app.sweeps import RetentionSweep
from pawl.job_store.rpc.events import encode_event
from pawl.job_store.rpc.messages import usage_of
from tests.rpc.job_store.conftest import DAY_SECONDS, PLACES, RETENTION, Replica
from tests.rpc.job_store.user import Owner, User, result
from tests.unit.job_store.world import submission


async def age(database: Database, table: str, column: str) -> None:
    async with database.acquire() as connection:
        await connection.execute(f"UPDATE job_store.{table} SET {column} = {column} - interval '31 days'")  # noqa: S608


async def count(database: Database) -> dict[str, int]:
    names = ("conversations", "messages", "runs", "calls", "commands", "events", "requests")
    async with database.acquire() as connection:
        return {name: await connection.fetchval(f"SELECT count(*) FROM job_store.{name}") for name in names}  # noqa: S608


DELTA = event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text="x"))
FAILURE = run_pb2.RunFailure(reason="INTERNAL")


async def age_conversation(database: Database, conversation_id: str) -> None:
    async with database.acquire() as connection:
        await connection.execute(
            "UPDATE job_store.conversations SET update_time = now() - interval '31 days' WHERE conversation_id = $1",
            conversation_id,
        )


class BrokenRetention(PostgresRetention):
    """An retention in which all but the last thing fails."""

    async def remove_requests(self, *, older_than_seconds: float, rows_max: int) -> int:
        raise DependencyUnavailable("a statement took too long")

    async def trim_logs(self, *, older_than_seconds: float, events_max: int) -> int:
        raise ValueError


def sweep(database: Database, retention: PostgresRetention | None = None) -> RetentionSweep:
    return RetentionSweep(retention or PostgresRetention(database), SystemClock(), RETENTION)


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


async def test_without_a_stream_logs_are_trimmed_and_the_outbox_is_emptied_all_the_same(
    user: User, database: Database
) -> None:
    """Life-cycle events wait a day for a NATS that is away, and keep nothing else for longer."""
    owner = await user.start()
    await owner.commit(events=[DELTA] * 5)
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    await age(database, "runs", "end_time")
    await sweep(database).sweep()
    assert (await count(database))["events"] > 1  # It may still be told of.

    await age(database, "outbox", '"time"')
    await sweep(database).sweep()

    assert (await count(database))["events"] == 1
    assert (await PostgresLedgerStats(database, PLACES).count())["outbox"] == 0


async def test_what_cannot_be_removed_keeps_nothing_else_from_going(user: User, database: Database) -> None:
    owner = await user.start(conversation_id="old")
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    await age(database, "conversations", "update_time")

    await sweep(database, BrokenRetention(database)).sweep()

    assert (await count(database))["conversations"] == 0


async def test_a_large_conversation_goes_in_several_transactions(user: User, database: Database) -> None:
    """Nobody can enter it in between, and in the end nothing is left of it."""
    owner = await user.start(conversation_id="old")
    for number in range(3):
        messages = [message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="x")] * 10
        calls = [
            owner.call(f"c{number}_{index}", call_pb2.CALL_STATE_FAILED, index=index, result=result())
            for index in range(10)
        ]
        await owner.commit(events=[DELTA] * 10, messages=messages, calls=calls)
        await user.send(owner.run_id, f"cmd_{number}", steer=pb.SteerCommand(text="hi"))
    await owner.commit(state=run_pb2.RUN_STATE_FAILED, failure=FAILURE, consumed=["cmd_0", "cmd_1", "cmd_2"])
    await user.submit("another one", conversation_id="young")
    young = await count(database)
    await age_conversation(database, "old")
    retention, rounds = PostgresRetention(database), 0

    while removed := await retention.remove_conversations(older_than_seconds=30 * DAY_SECONDS, rows_max=7):
        rounds += 1
        assert removed <= 7 * 5
        with pytest.raises(ConversationNotFound):
            await user.submit(conversation_id="old", conversation_must_exist=True)

    assert rounds > 5
    left = await count(database)
    assert left == {"conversations": 1, "messages": 1, "runs": 1, "calls": 0, "commands": 0, "events": 2, "requests": 0}
    assert young["runs"] == 2


async def test_without_a_nats_nothing_is_kept_for_one(database: Database) -> None:
    journal = PostgresJournal(database, IdSource(SystemClock()), encode_event, usage_of, keeps_lifecycle=False)
    await journal.write([submission(message=b"")])
    assert (await PostgresLedgerStats(database, PLACES).count())["outbox"] == 0


async def test_the_ledger_is_counted(user: User, database: Database) -> None:
    """OPS-2."""
    await user.start(conversation_id="c1")
    await user.submit(conversation_id="c2")
    counts = await PostgresLedgerStats(database, PLACES).count()
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
    assert (await PostgresLedgerStats(database, PLACES).count())["outbox"] == 1
