"""Announcements: live events, wake-ups and lifecycle events on JetStream."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from nats.js.errors import NotFoundError

from pawl.event.v1 import call_pb2, event_pb2, run_pb2, schedule_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.erasure.store.retention import PostgresRetention
from pawl.server.bus.connection import Bus
from pawl.server.db.database import Database
from pawl.server.process.metrics import Metrics
from tests import servers
from tests.poll import until
from tests.rpc.job_store.conftest import StartReplica
from tests.rpc.job_store.test_schedules import REFUSED, SKIPPED, STARTED, Timer
from tests.rpc.job_store.test_triggers import Hook
from tests.rpc.job_store.user import DIGEST, User

STREAM = "PAWL_LIFECYCLE"


class Received(NamedTuple):
    subject: str
    data: bytes
    headers: Mapping[str, str] = {}


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[servers.NatsServer]:
    """A nats-server that only this test uses and may stop or wipe."""
    folder = tmp_path / "nats"
    folder.mkdir()
    with servers.NatsServer(folder) as server:
        yield server


@pytest.fixture
async def listener(nats: servers.NatsServer) -> AsyncIterator[Bus]:
    async with Bus(nats.url, name="listener", metrics=Metrics("listener")) as bus:
        await bus.wait_connected()
        yield bus


async def receive(bus: Bus, subject: str) -> list[Received]:
    received: list[Received] = []

    async def keep(subject: str, data: bytes) -> None:
        received.append(Received(subject, data))

    await bus.subscribe(subject, keep)
    await bus.publish_all([], timeout_seconds=5)
    return received


async def lifecycle(bus: Bus, count: int) -> list[Received]:
    subscription = await bus.jetstream().pull_subscribe("pawl.v1.*.lifecycle.*", stream=STREAM)
    messages = await subscription.fetch(count, timeout=60)
    return [Received(message.subject, message.data, message.headers or {}) for message in messages]


async def has_messages(bus: Bus, count: int) -> bool:
    try:
        return (await bus.jetstream().stream_info(STREAM)).state.messages == count
    except NotFoundError:
        return False


async def outbox_is_empty(database: Database) -> bool:
    return bool(await database.fetchval("SELECT count(*) = 0 FROM job_store.outbox"))


async def test_watchers_get_the_bytes_of_the_log(start: StartReplica, nats: servers.NatsServer, listener: Bus) -> None:
    """EVT-1, I8: live events equal the logged events byte for byte."""
    replica = await start(nats_url=nats.url)
    await replica.bus.wait_connected()
    received = await receive(listener, "pawl.v1.acme.run.*.events")
    user = User(replica.stub)
    owner = await user.start()
    await owner.commit(events=[event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text="hi"))])
    events = await user.events(owner.run_id)

    def live() -> list[event_pb2.RunEvent]:
        return [event for message in received for event in event_pb2.RunEvents.FromString(message.data).events]

    await until(lambda: len(live()) >= len(events))
    assert [event.SerializeToString() for event in live()] == [event.SerializeToString() for event in events]
    assert len(received) < len(events), "events of one commit are published together"
    assert {message.subject for message in received} == {f"pawl.v1.acme.run.{owner.run_id}.events"}


async def test_workers_are_woken_for_work_and_for_commands(
    start: StartReplica, nats: servers.NatsServer, listener: Bus
) -> None:
    replica = await start(nats_url=nats.url)
    await replica.bus.wait_connected()
    work = await receive(listener, "pawl.internal.v1.work")
    wakeups = await receive(listener, "pawl.internal.v1.worker.w1")
    user = User(replica.stub)
    owner = await user.start()
    await user.send(owner.run_id, steer=pb.SteerCommand(text="hi"))
    woken = [f"acme/{owner.run_id}".encode()]
    await until(lambda: len(work) == 1 and [message.data for message in wakeups] == woken)
    await owner.park(run_pb2.WAIT_KIND_ANSWER)
    await until(lambda: len(work) == 2)


async def test_lifecycle_events_reach_jetstream_and_are_resent_if_deleted(
    start: StartReplica, nats: servers.NatsServer, listener: Bus, database: Database
) -> None:
    """NOTE-2: resent events keep their order and ids, even if no consumer ever read the deleted messages."""
    user = User((await start(nats_url=nats.url)).stub)
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    owner = await user.start(traceparent=trace)
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED, output_text="done")
    await until(lambda: outbox_is_empty(database))
    before = await lifecycle(listener, 3)
    kinds = ("queued", "running", "completed")
    assert [message.subject for message in before] == [f"pawl.v1.acme.lifecycle.{kind}" for kind in kinds]
    event, headers = event_pb2.RunEvent.FromString(before[-1].data), before[-1].headers
    assert event == (await user.events(owner.run_id))[-1]
    assert headers["Nats-Msg-Id"] == headers["ce-id"] == event.event_id
    assert (headers["ce-type"], headers["ce-specversion"]) == ("pawl.run.completed", "1.0")
    assert (headers["traceparent"], event.run_changed.run.trace) == (trace, trace)
    await listener.jetstream().delete_stream(STREAM)
    await user.submit(conversation_id="c2")
    await until(lambda: outbox_is_empty(database))
    assert (await listener.jetstream().stream_info(STREAM)).state.messages == 4
    assert (await lifecycle(listener, 4))[:3] == before
    later = await user.take()
    await later.commit(trace=trace)
    assert (await user.run(later.run_id)).trace == trace


async def test_events_that_nats_missed_or_lost_are_resent(
    start: StartReplica, nats: servers.NatsServer, database: Database, tmp_path: Path
) -> None:
    """A NATS outage only delays events.

    NATS acknowledges before it syncs, so a power cut can lose the last messages.
    """
    await asyncio.to_thread(nats.stop)
    user = User((await start(nats_url=nats.url)).stub)
    store, earlier = tmp_path / "nats" / "store", tmp_path / "earlier"
    await user.submit(conversation_id="c1")
    assert not await outbox_is_empty(database)
    await asyncio.to_thread(nats.start)
    await until(lambda: outbox_is_empty(database))
    await asyncio.to_thread(nats.stop)
    shutil.copytree(store, earlier)
    await asyncio.to_thread(nats.start)
    for number in range(2, 6):
        await user.submit(conversation_id=f"c{number}")
    await until(lambda: outbox_is_empty(database))
    await asyncio.to_thread(nats.stop)
    shutil.rmtree(store)
    earlier.rename(store)
    await asyncio.to_thread(nats.start)
    async with Bus(nats.url, name="late", metrics=Metrics("late")) as bus:
        await bus.wait_connected()
        await until(lambda: has_messages(bus, 5))
        events = [event_pb2.RunEvent.FromString(message.data) for message in await lifecycle(bus, 5)]
    assert [event.conversation_id for event in events] == [f"c{number}" for number in range(1, 6)]


async def test_published_events_are_deleted_after_retention(
    start: StartReplica, nats: servers.NatsServer, listener: Bus, database: Database
) -> None:
    user = User((await start(nats_url=nats.url)).stub)
    await user.submit(conversation_id="old")
    await until(lambda: outbox_is_empty(database))
    await database.execute("UPDATE job_store.sent SET sent_time = sent_time - interval '1 day'")
    await user.submit(conversation_id="new")
    await until(lambda: outbox_is_empty(database))
    assert await PostgresRetention(database).remove_sent(older_than_seconds=3600, rows_max=10) == 1
    await listener.jetstream().delete_stream(STREAM)
    await user.submit(conversation_id="newest")
    await until(lambda: outbox_is_empty(database))
    assert (await listener.jetstream().stream_info(STREAM)).state.messages == 2


async def test_two_replicas_deliver_each_event_once_and_in_order(
    start: StartReplica, nats: servers.NatsServer, listener: Bus, database: Database
) -> None:
    """I15: both replicas create runs and publish events."""
    users = [User((await start(nats_url=nats.url)).stub) for _ in range(2)]
    await asyncio.gather(*(users[number % 2].submit(conversation_id=f"c{number}") for number in range(40)))
    await until(lambda: outbox_is_empty(database))
    assert len({message.headers["ce-id"] for message in await lifecycle(listener, 40)}) == 40
    assert (await listener.jetstream().stream_info(STREAM)).state.messages == 40


@pytest.mark.parametrize(("payload_bytes_max", "told"), [(20_000, [16_384]), (4096, [0]), (1100, [])])
async def test_oversized_lifecycle_event_is_shortened_or_dropped_without_blocking(
    start: StartReplica, database: Database, tmp_path: Path, payload_bytes_max: int, told: list[int]
) -> None:
    """I20: a message that NATS rejects must not block later messages."""
    with servers.NatsServer(tmp_path, f"max_payload = {payload_bytes_max}") as nats:
        replica = await start(nats_url=nats.url)
        owner = await User(replica.stub).start()
        await owner.commit(state=run_pb2.RUN_STATE_COMPLETED, output_text="x" * 100_000)
        await until(lambda: outbox_is_empty(database))
        events = [event_pb2.RunEvent.FromString(each.data) for each in await lifecycle(replica.bus, 3)] if told else []
        ends = [event.run_changed.run for event in events if event.type == "run.completed"]
        assert [(run.run_id, len(run.output_text)) for run in ends] == [(owner.run_id, length) for length in told]


async def test_each_scheduled_run_publishes_its_outcome_once(
    start: StartReplica, nats: servers.NatsServer, listener: Bus, database: Database
) -> None:
    """NOTE-2: the event names the run. A waiting firing is published when its wait ends, with its own id."""
    replica = await start(nats_url=nats.url)
    timer, hook = Timer(replica), Hook(replica)
    await timer.put(overlap=schedule_pb2.SCHEDULE_OVERLAP_QUEUE)
    first = await timer.fire_due()
    assert (await timer.fire_due()).outcome == schedule_pb2.SCHEDULE_FIRE_OUTCOME_WAITING
    await timer.fire_due()
    await timer.put("other")
    refused = await timer.trigger("other", refusal="AGENT_NOT_FOUND: gone", request_id="again")
    assert await timer.trigger("other", refusal="AGENT_NOT_FOUND: gone", request_id="again") == refused
    await hook.put()
    delivered = [await hook.deliver("msg_1") for _ in range(2)]
    await until(lambda: outbox_is_empty(database))
    told = [message for message in await lifecycle(listener, 20) if message.subject.endswith("_fired")]
    events = [event_pb2.RunEvent.FromString(message.data) for message in told]
    assert [(event.type, event.starter_fired.fire.outcome, event.run_id) for event in events] == [
        ("schedule.fired", STARTED, first.run_id),
        ("schedule.fired", SKIPPED, ""),
        ("schedule.fired", REFUSED, ""),
        ("trigger.fired", STARTED, delivered[0].fire.run_id),
    ]
    fired, headers = events[0].starter_fired, told[0].headers
    assert (fired.fire, fired.name, fired.user_id) == (first, "watch", "ann")
    assert (events[0].conversation_id, events[0].seq) == (first.conversation_id, 0)
    assert told[0].subject == "pawl.v1.acme.lifecycle.schedule_fired"
    assert headers["Nats-Msg-Id"] == headers["ce-id"] == events[0].event_id
    assert (headers["ce-type"], headers["ce-subject"]) == ("pawl.schedule.fired", first.run_id)
    assert "ce-subject" not in told[1].headers


async def test_inbox_watchers_are_notified_only_when_something_changes(
    start: StartReplica, nats: servers.NatsServer, listener: Bus
) -> None:
    replica = await start(nats_url=nats.url)
    await replica.bus.wait_connected()
    received = await receive(listener, "pawl.internal.v1.inboxes")
    live = await receive(listener, "pawl.v1.acme.run.*.events")
    user = User(replica.stub)

    def fences() -> int:
        return len([message for message in live if b"fence" in message.data])

    async def check_published(*expected: str) -> None:
        """Check which messages arrived since the last call, using a new event as the end mark."""
        before = fences()
        await owner.commit(events=[event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text="fence"))])
        await until(lambda: fences() > before and len(received) >= len(expected))
        assert [message.data.decode() for message in received] == list(expected)
        received.clear()

    owner = await user.start()
    approval = {"index": 2, "approval": {"digest": DIGEST}}
    await owner.commit(calls=[owner.call("call_0", call_pb2.CALL_STATE_RUNNING, index=0)])
    await check_published()
    changes: list[Callable[[], Awaitable[Any]]] = [
        lambda: owner.commit(calls=[owner.call("call_1", call_pb2.CALL_STATE_OFFERED, index=1)]),
        lambda: user.lease(owner.run_id, "call_1", "tab"),
        lambda: owner.commit(calls=[owner.call("call_2", call_pb2.CALL_STATE_AWAITING_APPROVAL, **approval)]),
        lambda: user.decide(owner.run_id, "call_2", call_pb2.DECISION_KIND_APPROVE),
        lambda: user.cancel(owner.run_id),
    ]
    for change in changes:
        await change()
        await check_published('[["acme","ann"]]')


async def test_watchers_are_notified_of_changes_but_not_of_output(
    start: StartReplica, nats: servers.NatsServer, listener: Bus
) -> None:
    replica = await start(nats_url=nats.url)
    await replica.bus.wait_connected()
    received = await receive(listener, "pawl.internal.v1.conversations")
    live = await receive(listener, "pawl.v1.acme.run.*.events")
    user = User(replica.stub)
    owner = await user.start()
    await until(lambda: len(received) == 2)
    assert f'[["acme","{owner.conversation_id}"]]' == received[-1].data.decode()
    count = len(live)
    await owner.commit(events=[event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text="x"))])
    await until(lambda: len(live) > count)
    await user.ask("UpdateConversation", conversation_id=owner.conversation_id, title="New")
    await until(lambda: len(received) >= 3)
    assert len(received) == 3
