"""The bus against a real nats-server that stops and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pawl.errors import DependencyUnavailable
from pawl.server.bus.connection import Bus
from pawl.server.process.metrics import Metrics
from tests.poll import until
from tests.servers import NatsServer


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("test")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path) as server:
        yield server


def bus_to(url: str | None, metrics: Metrics) -> Bus:
    return Bus(url, name="test", metrics=metrics)


@pytest.fixture
async def bus(nats_url: str, metrics: Metrics) -> AsyncIterator[Bus]:
    async with bus_to(nats_url, metrics) as bus:
        await bus.wait_connected()
        yield bus


class Inbox:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    async def __call__(self, subject: str, data: bytes) -> None:
        await self.messages.put((subject, data))


async def test_published_messages_arrive_in_order(bus: Bus) -> None:
    inbox = Inbox()
    await bus.subscribe("order.*", inbox)
    for number in range(100):
        await bus.publish(f"order.{number}", b"%d" % number)
    got = [await inbox.messages.get() for _ in range(100)]
    assert got == [(f"order.{number}", b"%d" % number) for number in range(100)]


async def test_starting_and_publishing_do_not_fail_without_a_server(metrics: Metrics) -> None:
    """Without NATS a service is slower but still correct."""
    async with bus_to("nats://127.0.0.1:9", metrics) as bus:
        await bus.subscribe("anything", Inbox())
        await bus.publish("anything", b"lost")
        assert not bus.connected
        with pytest.raises(DependencyUnavailable):
            bus.jetstream()
        with pytest.raises(DependencyUnavailable):
            await bus.ping()
    assert 'pawl_test_bus_dropped_total{cause="disconnected"} 1.0' in metrics.text().decode()


async def test_a_hook_runs_on_the_current_connection_after_start(nats_url: str, metrics: Metrics) -> None:
    """A ping at start waits for the first connection attempt."""
    ran = asyncio.Event()

    async def hook() -> None:
        ran.set()

    async with bus_to(nats_url, metrics) as bus:
        await bus.ping()
        assert bus.connected
        bus.on_connected(hook)
        await ran.wait()


async def test_without_a_url_the_bus_is_disabled(metrics: Metrics) -> None:
    async with bus_to(None, metrics) as bus:
        await bus.publish("anything", b"lost")
        assert not bus.connected
        with pytest.raises(DependencyUnavailable):
            await bus.ping()


async def test_subscriptions_are_restored_with_the_server(server: NatsServer, metrics: Metrics) -> None:
    inbox = Inbox()
    server.stop()
    async with bus_to(server.url, metrics) as bus:
        await bus.subscribe("news", inbox)
        gone = await bus.subscribe("old.news", inbox)
        for number in range(3):
            server.start()
            await bus.wait_connected()
            await bus.publish("old.news", b"old") if number else None
            await bus.publish("news", b"%d" % number)
            assert (await inbox.messages.get())[1] == b"%d" % number
            await gone.unsubscribe()
            server.stop()
            await until(lambda: not bus.connected)


async def test_a_callback_that_failed_still_gets_the_next_message(bus: Bus) -> None:
    """I20: one failed message does not end the subscription."""
    inbox = Inbox()

    async def callback(subject: str, data: bytes) -> None:
        if data == b"bad":
            raise RuntimeError
        await inbox(subject, data)

    await bus.subscribe("mixed", callback)
    await bus.publish("mixed", b"bad")
    await bus.publish("mixed", b"good")
    assert (await inbox.messages.get())[1] == b"good"


async def test_a_message_that_cannot_be_sent_does_not_stop_the_next(bus: Bus, metrics: Metrics) -> None:
    inbox = Inbox()
    await bus.subscribe("sizes", inbox)
    await bus.publish("sizes", b"x" * 2_000_000)
    await bus.publish("two words", b"")
    await bus.publish("sizes", b"fits")
    assert (await inbox.messages.get())[1] == b"fits"
    assert 'pawl_test_bus_dropped_total{cause="refused"} 2.0' in metrics.text().decode()


async def test_a_flood_is_dropped_instead_of_buffered(bus: Bus, metrics: Metrics) -> None:
    """I19: dropped messages are counted."""
    for _ in range(50):
        await bus.publish("flood", b"x" * 1_000_000)
    assert 'pawl_test_bus_dropped_total{cause="full"}' in metrics.text().decode()


async def test_publishing_a_batch_returns_once_the_server_has_stored_it(server: NatsServer, metrics: Metrics) -> None:
    inbox = Inbox()
    async with bus_to(server.url, metrics) as bus:
        await bus.wait_connected()
        await bus.subscribe("batch", inbox)
        await bus.publish_all([("batch", b"1", {"A": "b"}), ("batch", b"2", {})])
        assert [(await inbox.messages.get())[1] for _ in range(2)] == [b"1", b"2"]
        server.stop()
        with pytest.raises(DependencyUnavailable):
            await bus.publish_all([("batch", b"3", {})], timeout_seconds=0.1)
    assert "pawl_test_bus_published_total 2.0" in metrics.text().decode()
