"""Each event is told once, whatever comes twice, is garbage, or is lost with NATS."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from tests.poll import until
from tests.system.notifier.conftest import Suite, inbox, listen


async def test_events_are_in_the_inbox_and_on_nats_once_each_and_garbage_holds_up_nothing(suite: Suite) -> None:
    """NOTE-1, I15, I20: also what happened while no notifier ran, and what comes twice."""
    await suite.create_stream()
    listener = await listen(suite)
    for number in range(50):
        await suite.emit(f"evt_{number}")
    replica = await suite.replica()
    told = [f"evt_{number}" for number in range(50)]
    assert await inbox(replica, 50) == told
    for data in (b"", b"\xff\xff\xff", b"x" * 100_000):
        await suite.emit_bytes(data)
    for event in ("evt_a", "evt_a", "evt_b"):
        await suite.emit(event, deduplicate=False)
    told += ["evt_a", "evt_b"]
    assert await inbox(replica, 52) == told
    assert await listener.until(52) == told
    assert listener.ids == [notification.notification_id for notification in listener.heard]
    assert [notification.number for notification in listener.heard] == list(range(1, 53))
    stream = (await suite.connect()).jetstream()

    async def all_is_acknowledged() -> bool:
        return not (await stream.consumer_info("PAWL_LIFECYCLE", "notifier")).num_ack_pending

    await until(all_is_acknowledged)
    assert await asyncio.to_thread(replica.stop) == 0


async def test_nats_stopped_wiped_and_back_needs_no_restart_and_what_was_not_published_is_published_later(
    suite: Suite, tmp_path: Path
) -> None:
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
    await asyncio.to_thread(replica.stop)
    await suite.execute("UPDATE notifier.notifications SET publish_time = NULL")
    listener = await listen(suite)
    await replica.start()
    assert sorted(await listener.until(2)) == ["evt_a", "evt_b"]
