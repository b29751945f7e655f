"""Periodic work of the ledger: retention and counters."""

from __future__ import annotations

import time
from typing import Any

from pawl.chassis.ids import IdSource, StoreId
from pawl.chassis.process.clock import SystemClock
from pawl.errors import CallNotFound, ConversationNotFound, DependencyUnavailable, PawlError, RunNotFound
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.erasure.store.retention import PostgresRetention
from pawl.job_store.ledger.cache import RunCache
from pawl.job_store.ledger.ports import Limits
from pawl.job_store.ledger.store.journal import PostgresJournal
from pawl.job_store.ledger.store.upkeep import PostgresLedgerStats
from pawl.job_store.sweeps import sweep_retention
from pawl.server.db.database import Database
from tests.rpc.job_store.conftest import ACME, DAY_SECONDS, RETENTION, SLOT_LIMITS, SLOTS, Replica, limits_of
from tests.rpc.job_store.user import DIGEST, Owner, User, result
from tests.rpc.refusals import raises
from tests.unit.job_store.world import submission


async def age(database: Database, table: str, column: str) -> None:
    await database.execute(f"UPDATE job_store.{table} SET {column} = {column} - interval '31 days'")  # noqa: S608


async def count(database: Database) -> dict[str, int]:
    names = ("conversations", "messages", "runs", "calls", "commands", "events", "requests")
    return {name: await database.fetchval(f"SELECT count(*) FROM job_store.{name}") for name in names}  # noqa: S608


DELTA = event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text="x"))
FAILURE = run_pb2.RunFailure(reason="INTERNAL")


async def age_conversation(database: Database, conversation_id: str) -> None:
    await database.execute(
        "UPDATE job_store.conversations SET update_time = now() - interval '31 days' WHERE conversation_id = $1",
        conversation_id,
    )


class BrokenRetention(PostgresRetention):
    """A retention run in which all steps but the last fail."""

    async def remove_requests(self, *, older_than_seconds: float, rows_max: int) -> int:
        raise DependencyUnavailable("a statement took too long")

    async def trim_logs(self, *, older_than_seconds: float, events_max: int) -> int:
        raise ValueError

    async def summary_ages(self) -> dict[StoreId, float]:
        raise DependencyUnavailable("a statement took too long")


async def sweep(database: Database, retention: PostgresRetention | None = None) -> None:
    await sweep_retention(retention or PostgresRetention(database), SystemClock(), RETENTION, limits_of)


async def test_inactive_conversations_are_deleted_completely(user: User, database: Database) -> None:
    owner = await user.start(conversation_id="old", request_id="r1")
    await user.send(owner.run_id, "cmd_1", steer=pb.SteerCommand(text="hi"))
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED, consumed=["cmd_1"])
    await sweep(database)
    assert (await user.run(owner.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    await age(database, "conversations", "update_time")
    await age(database, "requests", "create_time")
    await user.submit(conversation_id="new")
    await sweep(database)
    await raises(RunNotFound, user.run(owner.run_id))
    assert await count(database) == {
        "conversations": 1,
        "messages": 1,
        "runs": 1,
        "calls": 0,
        "commands": 0,
        "events": 1,
        "requests": 0,
    }


async def test_each_store_keeps_its_conversations_for_its_own_time(replica: Replica, database: Database) -> None:
    for store_id in ("acme", "beta", "gamma"):
        owner = await User(replica.stub, store_id=store_id).start(conversation_id=store_id)
        await owner.commit(state=run_pb2.RUN_STATE_FAILED, failure=FAILURE)
        await age_conversation(database, store_id)
    days = {"acme": 30, "beta": 32, "gamma": 5}

    def of_store(store_id: StoreId) -> Limits:
        return Limits(slots=SLOT_LIMITS, conversation_retention_days=days[store_id])

    await sweep_retention(PostgresRetention(database), SystemClock(), RETENTION, of_store)
    assert await database.fetchval("SELECT string_agg(store_id, ' ') FROM job_store.conversations") == "beta"


async def test_conversation_with_an_open_run_is_kept_at_any_age(user: User, database: Database, owner: Owner) -> None:
    """I3: a waiting run is not deleted."""
    await owner.park(run_pb2.WAIT_KIND_ANSWER)
    await age(database, "conversations", "update_time")
    await sweep(database)
    assert (await user.run(owner.run_id)).state == run_pb2.RUN_STATE_WAITING


async def test_logs_and_outbox_are_trimmed_without_a_stream(user: User, database: Database, owner: Owner) -> None:
    """If NATS is unavailable, lifecycle events are kept for a day. After that, logs are trimmed without them."""
    await owner.commit(events=[DELTA] * 5)
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    await age(database, "runs", "end_time")
    await sweep(database)
    assert (await count(database))["events"] > 1  # It may still be notified

    await age(database, "outbox", '"time"')
    await sweep(database)

    assert (await count(database))["events"] == 1
    assert (await PostgresLedgerStats(database, SLOTS).count())["outbox"] == 0


async def test_item_that_cannot_be_deleted_does_not_block_others(user: User, database: Database) -> None:
    await (await user.start(conversation_id="old")).commit(state=run_pb2.RUN_STATE_COMPLETED)
    await age(database, "conversations", "update_time")

    await sweep(database, BrokenRetention(database))

    assert (await count(database))["conversations"] == 0


async def test_large_conversation_is_deleted_in_several_transactions(user: User, database: Database) -> None:
    """No message can enter the conversation between these transactions, and no row remains at the end."""
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

    while removed := await retention.remove_conversations(
        store_id=ACME, older_than_seconds=30 * DAY_SECONDS, rows_max=5
    ):
        rounds += 1
        assert removed <= 5 * 5
        await raises(ConversationNotFound, user.submit(conversation_id="old", conversation_must_exist=True))

    assert rounds > 5
    left = await count(database)
    assert left == {"conversations": 1, "messages": 1, "runs": 1, "calls": 0, "commands": 0, "events": 1, "requests": 0}
    assert young["runs"] == 2


async def test_a_deployment_without_nats_does_not_keep_an_outbox(database: Database) -> None:
    journal = PostgresJournal(database, IdSource(SystemClock()), RunCache(time.monotonic), keeps_lifecycle=False)
    await journal.write([submission(message=b"")])
    assert (await PostgresLedgerStats(database, SLOTS).count())["outbox"] == 0


async def test_operations_and_refusals_are_counted(user: User, replica: Replica, owner: Owner) -> None:
    """OPS-2: refusals are counted by reason."""
    await raises(PawlError, Owner(user, owner.run_id, 99).commit())
    text = replica.metrics.text().decode()
    lines = ('refusals_total{reason="LEASE_LOST"} 1.0', "lease_losses_total 1.0", "group_operations_count 3.0")
    assert [line for line in lines if line not in text] == []


async def talk(user: User, call_id: str, *, summarised_to: int = 0) -> Owner:
    owner = await user.start("a question", conversation_id="thread")
    await user.send(owner.run_id, f"cmd_{call_id}", steer=pb.SteerCommand(text="hi"))
    summary = message_pb2.Message(role=message_pb2.ROLE_SUMMARY, text="So far.", summarised_to_number=summarised_to)
    answer = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="An answer.", call_ids=[call_id])
    call = owner.call(call_id, call_pb2.CALL_STATE_FAILED, result=result())
    messages = [summary, answer] if summarised_to else [answer]
    await owner.commit(messages=messages, calls=[call], consumed=[f"cmd_{call_id}"])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    return owner


async def grow_old(database: Database, *, days: int = 31) -> None:
    """Make all messages and runs older."""
    for table, columns in {"messages": ["create_time"], "runs": ["create_time", "end_time"]}.items():
        changes = ", ".join(f"{column} = {column} - interval '{days} days'" for column in columns)
        await database.execute(f"UPDATE job_store.{table} SET {changes}")  # noqa: S608


async def rows_of(database: Database, run_id: str) -> dict[str, int]:
    names = ("runs", "calls", "commands", "events", "messages")
    statement = "SELECT count(*) FROM job_store.{} WHERE run_id = $1"
    return {name: await database.fetchval(statement.format(name), run_id) for name in names}


async def test_runs_that_were_summarised_long_ago_are_deleted_completely(user: User, database: Database) -> None:
    """All rows of the runs are deleted. The history for the model stays unchanged, with the results of its calls."""
    old = [await talk(user, "call_1"), await talk(user, "call_2")]
    cancelled = await user.start(conversation_id="thread")
    await cancelled.commit(state=run_pb2.RUN_STATE_FAILED, failure=run_pb2.RunFailure(reason="INTERNAL"))
    kept = await talk(user, "call_3", summarised_to=5)
    await grow_old(database)
    active = await user.start("and now?", conversation_id="thread")
    before = await active.load()

    await sweep(database)

    for owner in [*old, cancelled]:
        assert set((await rows_of(database, owner.run_id)).values()) == {0}
        await raises(RunNotFound, user.run(owner.run_id), user.events(owner.run_id))
    await raises(CallNotFound, user.ask("GetCall", call_id="call_1"))
    after = await active.load()
    assert (after.messages, after.calls) == (before.messages, before.calls)
    assert [call.call_id for call in after.calls if call.HasField("result")] == ["call_3"]
    assert (await user.run(kept.run_id)).state == run_pb2.RUN_STATE_COMPLETED


async def test_a_run_with_a_message_that_is_still_needed_is_kept_completely(user: User, database: Database) -> None:
    first, second = await talk(user, "call_1"), await talk(user, "call_2")
    # It replaces the question of the second run but not its answer.
    third = await talk(user, "call_3", summarised_to=3)
    await grow_old(database)
    await sweep(database)
    assert (await rows_of(database, first.run_id))["runs"] == 0
    assert (await rows_of(database, second.run_id))["messages"] == 2
    fourth = await talk(user, "call_4", summarised_to=7)
    await grow_old(database)
    await sweep(database)
    assert [(await rows_of(database, owner.run_id))["runs"] for owner in (second, third, fourth)] == [0, 0, 1]


async def test_partially_deleted_run_is_never_visible(user: User, database: Database) -> None:
    """Otherwise a run whose undo is half deleted could be undone again."""
    old = [await talk(user, f"call_{number}") for number in range(5)]
    await talk(user, "call_last", summarised_to=10)
    await grow_old(database)
    await PostgresRetention(database).remove_summarised(store_id=ACME, older_than_seconds=30 * DAY_SECONDS, rows_max=6)
    left = [owner for owner in old if (await rows_of(database, owner.run_id))["runs"]]
    assert left
    for owner in left:
        await raises(RunNotFound, user.run(owner.run_id), user.ask("ListCalls", run_id=owner.run_id))


async def test_commands_are_deleted_with_their_runs_log(user: User, database: Database) -> None:
    """A run that the history needs may have many commands. Repeated commands are late, as for any ended run."""
    owner = await talk(user, "call_1")
    await grow_old(database, days=8)
    await database.execute("DELETE FROM job_store.outbox")
    await sweep(database)
    assert await rows_of(database, owner.run_id) == {"runs": 1, "calls": 1, "commands": 0, "events": 1, "messages": 2}
    again = await user.send(owner.run_id, "cmd_call_1", steer=pb.SteerCommand(text="hi"))
    assert (again.outcome, again.reason) == (pb.COMMAND_OUTCOME_LATE, "RUN_ENDED")


async def test_runs_and_calls_are_measured_by_store(replica: Replica, user: User) -> None:
    """OPS-2: each start and end counts once, a repeated step not again."""
    failure = run_pb2.RunFailure(failure_class=run_pb2.FAILURE_CLASS_PROVIDER, reason="HTTP_500")
    failed = await user.start()
    await failed.commit(calls=[failed.call("c1", call_pb2.CALL_STATE_RUNNING)])
    done = failed.call("c1", call_pb2.CALL_STATE_SUCCEEDED, result=result())
    step: dict[str, Any] = {"state": run_pb2.RUN_STATE_FAILED, "failure": failure, "round": 3, "calls": [done]}
    for _ in range(2):
        await failed.commit("last", **step)
    other = User(replica.stub, store_id="other")
    await other.cancel((await other.submit()).run.run_id)
    parked, approval = await user.start(), call_pb2.ApprovalRequest(digest=DIGEST)
    call = parked.call("c2", call_pb2.CALL_STATE_AWAITING_APPROVAL, approval=approval)
    await parked.park(run_pb2.WAIT_KIND_APPROVAL, calls=[call])
    replica.ledger.meter.ledger_counted(await PostgresLedgerStats(replica.database, SLOTS).count())

    samples = {
        (sample.name.partition("_job_store_1_")[2], *sorted(sample.labels.items())): sample.value
        for metric in replica.metrics.registry.collect()
        for sample in metric.samples
        if "_job_store_1_" in sample.name
    }
    acme = ("store", "acme")
    expected = {
        ("runs_started_total", acme): 2,
        ("runs_started_total", ("store", "other")): 1,
        ("runs_ended_total", ("cause", "provider"), ("outcome", "failed"), acme): 1,
        ("runs_ended_total", ("cause", "user"), ("outcome", "cancelled"), ("store", "other")): 1,
        ("calls_ended_total", ("outcome", "succeeded"), acme): 1,
        ("run_duration_seconds_count", acme): 1,
        ("run_rounds_sum", acme): 3,
        ("queue_wait_seconds_count", acme): 2,
        ("waiting_runs", ("reason", "approval")): 1,
        ("waiting_runs", ("reason", "budget")): 0,
    }
    assert {key: samples.get(key) for key in expected} == expected
    assert 0 < samples["queue_wait_seconds_sum", acme] < samples["run_duration_seconds_sum", acme] * 2 + 60
    assert samples["batch_events_sum",] > samples["batch_events_count",] > 0
