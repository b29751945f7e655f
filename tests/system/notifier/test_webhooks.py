"""Each delivery arrives, always the same, whichever notifier dies at work (NOTE-1)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from standardwebhooks.webhooks import Webhook

from pawl.chassis.bus.connection import flush
from pawl.notify.v1 import channel_pb2 as pb
from pawl.notify.v1.channel_pb2_grpc import ChannelServiceStub
from tests.keys import keyed_channel
from tests.poll import until
from tests.system.notifier.conftest import Replica, Suite
from tests.web_server import Reply, WebServer, web_server

ANN = (("pawl-store", "acme"), ("pawl-user", "ann"))


@pytest.fixture
async def receiver() -> AsyncIterator[WebServer]:
    async with web_server(lambda _: Reply()) as server:
        yield server


async def replica_to(suite: Suite, receiver: WebServer, folder: Path) -> Replica:
    """One more notifier, which may reach the receiver."""
    egress = folder / "egress.json"
    egress.write_text(json.dumps({"acme": {"private": [f"127.0.0.1:{receiver.port}"]}}))
    return await suite.replica(PAWL_EGRESS_FILE=str(egress))


async def hook(replica: Replica, receiver: WebServer) -> pb.CreateChannelResponse:
    """A channel of ann."""
    async with keyed_channel(replica.address) as channel:
        webhook = pb.Channel(url=f"http://127.0.0.1:{receiver.port}/")
        return await ChannelServiceStub(channel).CreateChannel(pb.CreateChannelRequest(channel=webhook), metadata=ANN)


async def delivered(replica: Replica, channel_id: str) -> int:
    """The number of deliveries that have arrived."""
    async with keyed_channel(replica.address) as channel:
        request = pb.ListDeliveriesRequest(channel_id=channel_id, page_size=200)
        found = (await ChannelServiceStub(channel).ListDeliveries(request, metadata=ANN)).deliveries
    return sum(each.state == pb.CHANNEL_DELIVERY_STATE_DELIVERED for each in found)


async def test_a_notifier_killed_while_it_delivers_loses_nothing_and_changes_nothing(
    suite: Suite, receiver: WebServer, tmp_path: Path
) -> None:
    """OPS-5, NOTE-2."""
    await suite.create_stream()
    dies = await replica_to(suite, receiver, tmp_path)
    made, heard = await hook(dies, receiver), await listen_to_channels(suite)
    receiver.answer = lambda _: Reply(waits=True)
    for number in range(40):
        await suite.emit(f"evt_{number}")

    async def many_hang() -> bool:
        return len(receiver.asked) == 16

    await until(many_hang)
    dies.kill()
    hung = {asked.headers["webhook-id"] for asked in receiver.asked}
    receiver.answer = lambda _: Reply()
    lives = await replica_to(suite, receiver, tmp_path)

    async def others_are_there() -> bool:
        return await delivered(lives, made.channel.channel_id) == 24

    await until(others_are_there)
    await suite.execute("UPDATE notifier.webhook_deliveries SET due_time = now() WHERE claimed")  # Its claims end.

    async def all_are_there() -> bool:
        return await delivered(lives, made.channel.channel_id) == 40

    await until(all_are_there)
    times = Counter(asked.headers["webhook-id"] for asked in receiver.asked)
    assert times == {each: 2 if each in hung else 1 for each in times}
    assert len(times) == 40
    assert len({(asked.headers["webhook-id"], asked.body) for asked in receiver.asked}) == 40
    told = [Webhook(made.secret).verify(asked.body, dict(asked.headers)) for asked in receiver.asked]
    assert {each["data"]["event_id"] for each in told} == {f"evt_{number}" for number in range(40)}
    await deliveries_are_told(suite, receiver, made.channel.channel_id, heard)
    assert await asyncio.to_thread(lives.stop) == 0


async def listen_to_channels(suite: Suite) -> list[Msg]:
    """The messages about ann's channels, as they come."""
    heard: list[Msg] = []
    client = await suite.connect()

    async def on_message(message: Msg) -> None:
        heard.append(message)

    await client.subscribe("pawl.v1.acme.user.ann.channels", cb=on_message)
    await flush(client)
    return heard


async def deliveries_are_told(suite: Suite, receiver: WebServer, channel_id: str, heard: list[Msg]) -> None:
    """NOTE-2: what becomes of deliveries is on NATS at least once, under one id, as CloudEvents."""
    receiver.answer = lambda _: Reply(status=410)
    await suite.emit("evt_dead")

    async def all_are_told() -> bool:
        types = {event.event_id: event.type for event in (pb.ChannelEvent.FromString(each.data) for each in heard)}
        return Counter(types.values()) == {"delivery.delivered": 40, "delivery.dead": 1, "channel.disabled": 1}

    await until(all_are_told)
    for message in heard:
        event = pb.ChannelEvent.FromString(message.data)
        assert message.headers is not None
        assert message.headers["Nats-Msg-Id"] == message.headers["ce-id"] == event.event_id
        assert message.headers["ce-type"] == f"pawl.{event.type}"
        assert message.headers["ce-subject"] == event.channel_id == channel_id
        assert (event.store_id, event.user_id) == ("acme", "ann")
