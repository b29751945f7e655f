"""Erasure of conversations on PostgreSQL: step by step, with several replicas, and after a restore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import pytest

from pawl.chassis.ids import ConversationId, IdSource, StoreId
from pawl.chassis.process.clock import SystemClock
from pawl.errors import ConversationErased, ConversationNotFound, DependencyUnavailable, RequestIdReused, RunNotFound
from pawl.event.v1 import call_pb2, conversation_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.erasure.erasing import Erasing, JetStreamErasures
from pawl.job_store.erasure.rules import ErasureKey, Part
from pawl.job_store.erasure.store.erasures import PostgresErasures
from pawl.job_store.erasure.store.retention import PostgresRetention
from pawl.server.db.database import Database
from tests.poll import until
from tests.rpc.job_store.conftest import ACME, DAY_SECONDS, Replica, StartReplica
from tests.rpc.job_store.test_conversations import answered, get, index_all, listed, update
from tests.rpc.job_store.test_upkeep import age_conversation
from tests.rpc.job_store.user import User, result
from tests.rpc.refusals import raises

MARKER = "zanzibar"
SERVICES = (Part.TOOL_REGISTRY, Part.NOTIFIER)


class Log(JetStreamErasures):
    """A list of erased conversations in memory, and the runs whose lifecycle events were purged."""

    def __init__(self) -> None:
        self.entries: set[tuple[StoreId, ConversationId]] = set()
        self.purged: set[str] = set()
        self.looks: list[bool] = []
        self.is_away = False

    async def open(self) -> bool | None:
        return self.looks[-1] if self.looks else None

    def applied(self) -> None:
        self.looks.pop()

    async def read(self) -> AsyncIterator[Collection[tuple[StoreId, ConversationId]]]:
        yield list(self.entries)

    async def write(self, key: ErasureKey) -> None:
        if self.is_away:
            raise DependencyUnavailable
        self.entries.add((key.store_id, key.conversation_id))

    async def purge(self, store_id: StoreId, run_ids: Collection[str]) -> int:
        self.purged |= set(run_ids)
        return len(run_ids)


def erasing(replica: Replica, log: Log | None, monotonic: Callable[[], float] = lambda: 0.0) -> Erasing:
    return Erasing(
        PostgresErasures(replica.database),
        log,
        replica.ledger.group_commit,
        replica.ledger.conversations,
        IdSource(SystemClock()),
        monotonic=monotonic,
    )


async def erase(replica: Replica, conversation_id: str, user_id: str = "ann") -> Any:
    return await User(replica.stub, user_id=user_id).ask("EraseConversation", conversation_id=conversation_id)


async def sweep_all(sweep: Erasing) -> None:
    """Sweep often enough to erase a conversation and one child conversation."""
    for _ in range(6):
        await sweep.sweep()


async def everything(database: Database) -> str:
    tables = await database.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'job_store'")
    rows = [row for table in tables for row in await database.fetch(f"SELECT * FROM job_store.{table['tablename']}")]  # noqa: S608
    return "\n".join(repr(tuple(row)) for row in rows)


def key_of(conversation_id: str) -> ErasureKey:
    return ErasureKey(store_id="acme", conversation_id=conversation_id, user_id="ann")  # type: ignore[arg-type]


async def full_run(user: User) -> tuple[str, str]:
    """Return the ids of a conversation and its ended run, whose text fields contain the marker."""
    owner = await user.start(f"{MARKER} one", request_id="request", conversation_key=f"{MARKER} key")
    await user.send(owner.run_id, steer=ledger_pb2.SteerCommand(text=f"{MARKER} steer"))
    call = owner.call(
        "call_1",
        call_pb2.CALL_STATE_RUNNING,
        attempt=1,
        arguments_json=f'{{"a":"{MARKER}"}}'.encode(),
        context=call_pb2.EXECUTION_CONTEXT_BACKEND,
        effect_class=call_pb2.EFFECT_CLASS_AT_MOST_ONCE,
    )
    await owner.commit(calls=[call], loop_state=MARKER.encode())
    (steer,) = await owner.inbox()
    call.MergeFrom(call_pb2.Call(state=call_pb2.CALL_STATE_SUCCEEDED, result=result(f'"{MARKER}"')))
    answer = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=f"{MARKER} said", call_ids=["call_1"])
    steered = message_pb2.Message(role=message_pb2.ROLE_USER, text=f"{MARKER} steer")
    await owner.commit(calls=[call], messages=[answer, steered], consumed=[steer.command_id])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED, output_text=f"{MARKER} output")
    await update(
        user,
        owner.conversation_id,
        title=f"{MARKER} title",
        labels=conversation_pb2.Labels(labels={"about": MARKER}),
        request_id="named",
    )
    return owner.conversation_id, owner.run_id


async def test_erasure_leaves_only_ids_and_already_published_data(replica: Replica, user: User) -> None:
    conversation_id, run_id = await full_run(user)
    while await index_all(replica.database):
        pass
    kept = await user.start("something else")
    assert MARKER in await everything(replica.database)
    log = Log()
    assert await listed(user, query=MARKER) == [conversation_id]

    started = await erase(replica, conversation_id)
    assert started.erasure.waits_for == ["runs", "ledger", "tool-registry", "notifier", "stream", "log"]
    assert not started.erasure.HasField("end_time")
    sweep = erasing(replica, log)
    await sweep_all(sweep)

    assert MARKER not in await everything(replica.database)
    assert (await erase(replica, conversation_id)).erasure.waits_for == ["tool-registry", "notifier"]
    assert (log.entries, log.purged) == ({("acme", conversation_id)}, {run_id})
    for part in SERVICES:
        ((_, items),) = [each async for each in sweep.due(part)]
        assert (items.run_ids, items.call_ids, items.has_more) == ([run_id], ["call_1"], False)
        await sweep.erasures.done(key_of(conversation_id), part)
        assert [each async for each in sweep.due(part)] == []
    end = await erase(replica, conversation_id)
    assert end.erasure.HasField("end_time")
    assert not end.erasure.waits_for
    (left,) = end.left_calls
    assert (left.call_id, left.tool_name, left.state) == ("call_1", "tool", call_pb2.CALL_STATE_SUCCEEDED)
    assert left.effect_class == call_pb2.EFFECT_CLASS_AT_MOST_ONCE
    assert await replica.database.fetchval("SELECT count(*) FROM job_store.erased_items") == 1
    assert (await get(user, conversation_id=kept.conversation_id)).active_run_id == kept.run_id


async def test_a_conversation_that_is_being_erased_is_hidden_and_does_not_accept_messages(
    replica: Replica, user: User
) -> None:
    """I13: for other users, the conversation does not exist before the erasure either."""
    conversation_id, run_id = await full_run(user)
    await raises(ConversationNotFound, erase(replica, conversation_id, "bob"))
    await erase(replica, conversation_id)

    await raises(
        ConversationErased,
        *(
            user.submit("more", conversation_id=conversation_id),
            user.submit("more", conversation_id=conversation_id, conversation_must_exist=True),
            get(user, conversation_id=conversation_id),
            update(user, conversation_id, title="other"),
        ),
    )
    await raises(
        ConversationNotFound,
        get(User(user.stub, user_id="bob"), conversation_id=conversation_id),
        erase(replica, conversation_id, "bob"),
    )
    assert await listed(user) == []
    # The key can be used again.
    assert (await user.submit(conversation_key=f"{MARKER} key")).run.conversation_id != conversation_id
    await sweep_all(erasing(replica, None))
    await raises(RunNotFound, user.run(run_id))
    await raises(RequestIdReused, user.submit(f"{MARKER} one", request_id="request", conversation_key=f"{MARKER} key"))


async def test_runs_of_writers_and_sub_agents_are_erased_with_the_conversation(replica: Replica, user: User) -> None:
    conversation_id, _ = await full_run(user)
    await update(user, conversation_id, sharing=conversation_pb2.SHARING_WRITE)
    bob = User(user.stub, user_id="bob")
    owner = await bob.start(f"{MARKER} theirs", conversation_id=conversation_id, request_id="request")
    waiting = await bob.submit(f"{MARKER} later", conversation_id=conversation_id)
    call = owner.call("call_2", call_pb2.CALL_STATE_DELEGATED, child_run_id="run_child")
    await owner.commit(
        calls=[call], delegations=[ledger_pb2.Delegation(call_id="call_2", run_id="run_child", text=f"{MARKER} task")]
    )
    below = (await bob.run("run_child")).conversation_id
    await erase(replica, conversation_id)
    sweep = erasing(replica, None)
    await sweep.sweep()
    assert (await bob.run(waiting.run.run_id)).state == run_pb2.RUN_STATE_CANCELLED
    call.state, call.result.content_json = call_pb2.CALL_STATE_CANCELLED, b"null"
    (cancel,) = await owner.inbox()
    await owner.commit(state=run_pb2.RUN_STATE_CANCELLED, calls=[call], consumed=[cancel.command_id])

    await sweep_all(sweep)

    assert MARKER not in await everything(replica.database)
    await raises(RunNotFound, bob.run(owner.run_id))
    await raises(ConversationErased, get(bob, conversation_id=below))
    assert len((await erase(replica, conversation_id)).left_calls) == 1
    await raises(ConversationNotFound, *(erase(replica, each, "bob") for each in (conversation_id, below)))


async def test_a_restored_conversation_is_erased_again_and_a_lost_log_is_rebuilt(
    start: StartReplica, database: Database
) -> None:
    replica = await start()
    user, log = User(replica.stub), Log()
    conversation_id, _ = await full_run(user)
    sweep = erasing(replica, log)
    saved = {
        name: await database.fetch(f"SELECT t::text AS row FROM job_store.{name} AS t")  # noqa: S608
        for name in ("conversations", "messages", "runs", "calls", "events", "commands", "requests")
    }
    await erase(replica, conversation_id)
    await sweep_all(sweep)
    assert MARKER not in await everything(database)

    async with database.transaction() as connection:
        await connection.execute("TRUNCATE job_store.erased_items, job_store.conversation_words, job_store.outbox")
        for name in saved:
            await connection.execute(f"TRUNCATE job_store.{name} CASCADE")
        for name, rows in saved.items():
            columns = await connection.fetchval(
                "SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute WHERE attrelid = $1::text::regclass"
                " AND attnum > 0 AND NOT attisdropped AND attgenerated = ''",
                f"job_store.{name}",
            )
            for row in rows:
                await connection.execute(
                    f"INSERT INTO job_store.{name} ({columns}) SELECT {columns} FROM"  # noqa: S608
                    f" (SELECT ($1::text::job_store.{name}).*) AS one",
                    row["row"],
                )
    assert MARKER in await everything(database)
    assert (await get(user, conversation_id=conversation_id)).title == f"{MARKER} title"
    log.looks = [False]
    await sweep_all(sweep)
    assert MARKER not in await everything(database)
    await raises(ConversationErased, get(user, conversation_id=conversation_id))

    log.entries.clear()
    log.looks = [True]
    await sweep.sweep()
    assert log.entries == {("acme", conversation_id)}


async def test_erasing_is_shared_by_replicas_and_its_receipts_expire_with_the_conversations(
    start: StartReplica, database: Database
) -> None:
    replicas = [await start(), await start()]
    user = User(replicas[0].stub)
    ids = [await answered(user, f"{MARKER} {number}", f"{MARKER} output") for number in range(6)]
    for number, conversation_id in enumerate(ids):
        await erase(replicas[number % 2], conversation_id)
    sweeps = [erasing(replica, Log()) for replica in replicas]

    async def is_gone() -> bool:
        await asyncio.gather(*(each.sweep() for each in sweeps))
        receipts = [(await erase(replicas[0], each)).erasure for each in ids]
        return all(list(receipt.waits_for) == list(SERVICES) for receipt in receipts)

    await until(is_gone)
    assert MARKER not in await everything(database)
    for conversation_id in ids:
        for part in SERVICES:
            await sweeps[0].erasures.done(key_of(conversation_id), part)
        await age_conversation(database, conversation_id)
    retention = PostgresRetention(database)
    while await retention.remove_conversations(store_id=ACME, older_than_seconds=30 * DAY_SECONDS, rows_max=500):
        pass
    assert await database.fetchval("SELECT count(*) FROM job_store.conversations") == 0
    await raises(ConversationNotFound, erase(replicas[0], ids[0]))


async def test_child_conversation_can_be_erased_after_its_call_was_deleted(replica: Replica, user: User) -> None:
    """I22: retention may have deleted the calling run and its calls."""
    owner = await user.start("parent")
    call = owner.call("call_1", call_pb2.CALL_STATE_DELEGATED, child_run_id="run_child")
    await owner.commit(
        calls=[call], delegations=[ledger_pb2.Delegation(call_id="call_1", run_id="run_child", text=f"{MARKER} task")]
    )
    await (await user.take("run_child")).commit(state=run_pb2.RUN_STATE_COMPLETED)
    (done,) = await owner.inbox()
    call.MergeFrom(call_pb2.Call(state=call_pb2.CALL_STATE_SUCCEEDED, result=result("1")))
    await owner.commit(calls=[call], consumed=[done.command_id])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    below = (await user.run("run_child")).conversation_id
    for table in ("calls", "runs"):
        await replica.database.execute(f"DELETE FROM job_store.{table} WHERE run_id = $1", owner.run_id)  # noqa: S608

    await erase(replica, owner.conversation_id)
    await sweep_all(erasing(replica, None))

    await raises(ConversationErased, get(user, conversation_id=below))
    assert MARKER not in await everything(replica.database)


async def test_services_are_notified_of_runs_and_calls_deleted_by_retention(replica: Replica, user: User) -> None:
    """I22: the registry does not know to which conversation a rule for one run belongs."""
    conversation_id, run_id = await full_run(user)
    owner = await user.start("on", conversation_id=conversation_id)
    short = message_pb2.Message(role=message_pb2.ROLE_SUMMARY, text="short", summarised_to_number=3)
    await owner.commit(messages=[short])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    for table, columns in (("messages", ("create_time",)), ("runs", ("create_time", "end_time"))):
        for each in columns:
            await replica.database.execute(f"UPDATE job_store.{table} SET {each} = {each} - interval '31 days'")  # noqa: S608
    retention = PostgresRetention(replica.database)
    while await retention.remove_summarised(store_id=ACME, older_than_seconds=30 * DAY_SECONDS, rows_max=2):
        pass
    await raises(RunNotFound, user.run(run_id))

    await erase(replica, conversation_id)
    sweep = erasing(replica, None)
    await sweep_all(sweep)

    ((_, items),) = [each async for each in sweep.due(Part.TOOL_REGISTRY)]
    assert (sorted(items.run_ids), items.call_ids) == (sorted([run_id, owner.run_id]), ["call_1"])


_MANY = """
INSERT INTO job_store.conversations (store_id, conversation_id, user_id, queue, interrupting, last_number, create_time,
    update_time, erase_time, erase_user_id, erase_root, erase_parts)
SELECT 'other', 'old_' || n, '', '', '', 0, now(), now(), now() - interval '1 hour', 'bob', 'old_' || n, $1
FROM generate_series(1, 2001) AS n
"""


@pytest.mark.parametrize("parts", [["notifier"], ["log"], ["tool-registry", "future"]])
async def test_blocked_erasures_do_not_delay_others(replica: Replica, user: User, parts: list[str]) -> None:
    await replica.database.execute(_MANY, parts)
    conversation_id, run_id = await full_run(user)
    await erase(replica, conversation_id)
    log = Log()
    log.is_away = True
    await sweep_all(erasing(replica, log))
    assert MARKER not in await everything(replica.database)
    assert log.purged == {run_id}


async def test_applying_the_erasure_log_is_retried_after_a_failure(replica: Replica, user: User) -> None:
    """I22: after a restore, the database may be unavailable for a moment."""
    conversation_id, _ = await full_run(user)
    log = Log()
    log.entries.add((StoreId("acme"), ConversationId(conversation_id)))
    log.looks = [False]
    failed, read = [False], log.read

    async def fails_once() -> AsyncIterator[Collection[tuple[StoreId, ConversationId]]]:
        if not failed[0]:
            failed[0] = True
            raise DependencyUnavailable
        async for each in read():
            yield each

    log.read = fails_once  # type: ignore[method-assign]
    await sweep_all(erasing(replica, log))
    assert failed[0]
    assert MARKER not in await everything(replica.database)


async def test_notice_is_erased_with_its_jobs_conversation(replica: Replica, user: User) -> None:
    message = ledger_pb2.SubmitMessageRequest(
        store_id="acme", user_id="ann", text="work", policy=ledger_pb2.MESSAGE_POLICY_QUEUE
    )
    job = run_pb2.Job(tool_name="work", arguments_json=b"{}", iterations_max=1, timeout_seconds=60)
    run = (await user.ask("StartJob", run_id="run_job", message=message, job=job, asked_sha256=b"1")).run
    owner = await user.take("run_job")
    await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED, output_text="1")
    pending = "SELECT sum(notices_pending)::int FROM job_store.conversations"
    assert await replica.database.fetchval(pending) == 1
    await erase(replica, run.conversation_id)
    await sweep_all(erasing(replica, None))
    assert await replica.database.fetchval(pending) == 0
