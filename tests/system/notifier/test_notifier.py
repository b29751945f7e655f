"""Each event is told once, whatever dies, comes twice or is garbage."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from pawl.notify.v1 import notify_pb2
from pawl.notify.v1.notify_pb2_grpc import NotifyServiceStub
from tests.keys import keyed_channel
from tests.poll import until
from tests.system.notifier.conftest import Suite, inbox, listen

ANN = (("pawl-store", "acme"), ("pawl-user", "ann"))


async def test_an_event_is_in_the_inbox_and_on_nats_once_with_one_id(suite: Suite) -> None:
    """NOTE-1; and the process ends in order."""
    await suite.create_stream()
    listener = await listen(suite)
    replica = await suite.replica()
    await suite.emit("evt_a")
    assert await inbox(replica, 1) == ["evt_a"]
    assert await listener.until(1) == ["evt_a"]
    assert listener.ids == [listener.heard[0].notification_id]
    assert listener.heard[0].number == 1
    assert await asyncio.to_thread(replica.stop) == 0


async def test_an_event_that_comes_twice_is_told_once(suite: Suite) -> None:
    """I15."""
    await suite.create_stream()
    listener = await listen(suite)
    replica = await suite.replica()
    await suite.emit("evt_a", deduplicate=False)
    await suite.emit("evt_a", deduplicate=False)
    await suite.emit("evt_b")
    assert await inbox(replica, 2) == ["evt_a", "evt_b"]
    assert await listener.until(2) == ["evt_a", "evt_b"]


async def test_garbage_on_the_stream_holds_up_nothing(suite: Suite) -> None:
    """I20."""
    await suite.create_stream()
    replica = await suite.replica()
    for data in (b"", b"\xff\xff\xff", b"x" * 100_000):
        await suite.emit_bytes(data)
    await suite.emit("evt_a")
    assert await inbox(replica, 1) == ["evt_a"]
    stream = (await suite.connect()).jetstream()

    async def all_is_acknowledged() -> bool:
        return not (await stream.consumer_info("PAWL_LIFECYCLE", "notifier")).num_ack_pending

    await until(all_is_acknowledged)


async def test_what_happened_while_no_notifier_ran_is_told_when_one_runs(suite: Suite) -> None:
    await suite.create_stream()
    for number in range(100):
        await suite.emit(f"evt_{number}")
    replica = await suite.replica()
    assert await inbox(replica, 100) == [f"evt_{number}" for number in range(100)]


async def test_a_notifier_killed_at_work_loses_nothing_and_tells_nothing_twice_in_the_inbox(suite: Suite) -> None:
    """OPS-5. On NATS a notification may come again after a kill, under the same id."""
    await suite.create_stream()
    listener = await listen(suite)
    replicas = [await suite.replica(), await suite.replica()]
    for number in range(60):
        await suite.emit(f"evt_{number}")
        if number == 20:
            replicas[0].kill()
        if number == 40:
            await replicas[0].start()
    # What the dead replica had taken comes again once its time to answer is over.
    events = await inbox(replicas[1], 60)
    assert sorted(events) == sorted(f"evt_{number}" for number in range(60))
    await listener.until(60)
    assert len(set(listener.ids)) == 60


async def test_any_replica_tells_what_another_one_took(suite: Suite) -> None:
    """EVT: a follower on each of two replicas hears of every event, though each event goes to one of them."""
    await suite.create_stream()
    replicas = [await suite.replica(), await suite.replica()]
    channels = [keyed_channel(replica.address) for replica in replicas]
    streams = [
        NotifyServiceStub(channel).Subscribe(notify_pb2.SubscribeRequest(), metadata=ANN) for channel in channels
    ]
    for number in range(10):
        await suite.emit(f"evt_{number}")
    for responses in map(aiter, streams):
        seen: list[int] = []
        async with asyncio.timeout(60):
            while len(seen) < 10:
                response = await anext(responses)
                seen += [response.notification.number] if response.HasField("notification") else []
        assert seen == list(range(1, 11))
    for stream, channel in zip(streams, channels, strict=True):
        stream.cancel()
        await channel.close()


async def test_nats_stopped_and_wiped_and_back_goes_on_without_a_restart(suite: Suite, tmp_path: Path) -> None:
    """The consumer makes itself anew; what was told stays told, an event that comes again included."""
    await suite.create_stream()
    replica = await suite.replica()
    await suite.emit("evt_a")
    assert await inbox(replica, 1) == ["evt_a"]
    await asyncio.to_thread(suite.nats.stop)
    shutil.rmtree(tmp_path / "nats" / "store")
    assert await inbox(replica, 1) == ["evt_a"]
    await asyncio.to_thread(suite.nats.start)
    await suite.create_stream()
    await suite.emit("evt_a")
    await suite.emit("evt_b")
    assert await inbox(replica, 2) == ["evt_a", "evt_b"]


async def test_notifications_made_while_publishing_was_impossible_are_published_later(
    suite: Suite, tmp_path: Path
) -> None:
    """A notification is durable first and published when NATS can take it."""
    await suite.create_stream()
    replica = await suite.replica()
    await suite.emit("evt_a")
    await inbox(replica, 1)
    await asyncio.to_thread(replica.stop)
    await suite.mark_unpublished()
    listener = await listen(suite)
    await replica.start()
    assert await listener.until(1) == ["evt_a"]
