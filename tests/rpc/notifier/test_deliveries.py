"""Deliveries to a real receiver, which verifies them with the library of the specification (NOTE-1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from pawl.chassis.process.tasks import end
from pawl.errors import DependencyUnavailable
from pawl.notifier.channels.rules import KEY_GONE
from pawl.notifier.deliveries.rules import LOST
from pawl.notifier.inbox.rules import Draft
from pawl.notifier.inbox.store import PostgresStore
from pawl.notify.v1 import channel_pb2, notify_pb2
from pawl.server.db.database import Database
from pawl.server.egress.client import GuardedEgress
from tests.poll import until
from tests.rpc.notifier.conftest import ANN, DEAD, DELIVERED, WAITING, Desk, wired
from tests.web_server import Asked, Reply, WebServer

Drafts = Callable[..., Draft]


def answers(receiver: WebServer, *replies: Reply) -> None:
    following: Iterator[Reply] = iter(replies[:-1])
    receiver.answer = lambda _: next(following, replies[-1])


def pause_seconds(delivery: channel_pb2.ChannelDelivery) -> float:
    return (delivery.next_try_time.ToDatetime() - delivery.try_time.ToDatetime()).total_seconds()


def verified_body(asked: Asked, secret: str) -> Any:
    """Return the content of a request if it is signed with the secret."""
    assert asked.headers["content-type"] == "application/json"
    return Webhook(secret).verify(asked.body, dict(asked.headers))


async def test_notification_is_delivered_once_with_a_signature(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer
) -> None:
    channel_id, secret = await desk.hook("/ann?x=1")
    told = [draft("a", body="It is 391.", traceparent="t"), draft("b", user="bob"), draft("c", store="other")]
    assert [await store.add(told) for _ in range(2)] == [(3, 1), (0, 0)]
    delivery = await desk.delivery(channel_id, tries=1)
    (asked,) = receiver.asked
    body = verified_body(asked, secret)
    assert body["type"] == delivery.type == "run.completed"
    assert (body["data"]["title"], body["data"]["body"]) == ("About a", "It is 391.")
    assert asked.headers["webhook-id"] == delivery.delivery_id
    assert (asked.target, asked.headers["traceparent"]) == ("/ann?x=1", "t")
    assert (delivery.state, delivery.status, delivery.number, delivery.last_error) == (DELIVERED, 200, 1, "")
    with pytest.raises(WebhookVerificationError):
        verified_body(asked, "whsec_" + "A" * 43 + "=")


async def test_failing_receiver_gets_the_same_delivery_again(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer
) -> None:
    elsewhere = Reply(status=307, headers={"Location": "/elsewhere"})
    busy = Reply(status=429, headers={"Retry-After": "14400"})
    answers(receiver, Reply(status=500), Reply(breaks=True), elsewhere, busy, Reply(b"x", is_endless=True))
    channel_id, secret = await desk.hook()
    await store.add([draft("a")])
    first = await desk.delivery(channel_id, tries=1)
    assert (first.state, first.status, first.last_error) == (WAITING, 500, "the receiver answered 500")
    assert 4.5 <= pause_seconds(first) <= 5.5
    assert (await desk.channel(channel_id)).HasField("failing_since_time")
    for tries, status in ((2, 0), (3, 307), (4, 429)):  # Redirects are not followed
        await desk.hurry()
        delivery = await desk.delivery(channel_id, tries=tries)
        assert (delivery.state, delivery.status) == (WAITING, status)
    assert 12_900 <= pause_seconds(delivery) <= 15_900, "the receiver chose it"
    await desk.hurry()
    last = await desk.delivery(channel_id, tries=5)
    assert (last.state, last.last_error) == (DELIVERED, ""), "only the status of a response is read"
    assert {asked.target for asked in receiver.asked} == {"/"}

    async def has_recovered() -> bool:
        return not (await desk.channel(channel_id)).HasField("failing_since_time")

    await until(has_recovered)  # The channel is written after its delivery
    assert len({(asked.headers["webhook-id"], asked.body) for asked in receiver.asked}) == 1
    assert [verified_body(asked, secret)["type"] for asked in receiver.asked] == ["run.completed"] * 5


async def test_gone_receiver_disables_the_channel_and_notifies_the_user(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer
) -> None:
    receiver.answer = lambda asked: Reply(status=410 if asked.target == "/gone" else 200)
    gone, _ = await desk.hook("/gone", name="pager")
    other, _ = await desk.hook("/other")
    await store.add([draft("a")])
    assert (await desk.delivery(gone, tries=1)).state == DEAD
    channel = await desk.channel(gone)
    assert not channel.enabled
    assert "410" in channel.disable_reason
    newest, _ = await desk.inbox()
    assert (newest.kind, newest.channel_id) == (notify_pb2.NOTIFICATION_KIND_CHANNEL_DISABLED, gone)
    assert newest.title.startswith("Channel pager was disabled: ")

    async def other_has_both() -> bool:
        return sorted(each.type for each in await desk.deliveries(other)) == ["channel.disabled", "run.completed"]

    await until(other_has_both)
    await store.add([draft("b")])
    assert len(await desk.deliveries(gone)) == 1, "it gets no more deliveries"
    changed = await desk.change(gone, enabled=True, url=f"http://127.0.0.1:{receiver.port}/new")
    assert (changed.enabled, changed.disable_reason) == (True, "")


async def test_channel_with_a_revoked_key_is_disabled_before_delivery(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer, gone_keys: set[str]
) -> None:
    channel_id, _ = await desk.hook()
    gone_keys.add((await desk.channel(channel_id)).credential_id)
    await store.add([draft("a")])
    assert (await desk.delivery(channel_id, tries=1)).state == DEAD
    channel = await desk.channel(channel_id)
    assert (channel.enabled, channel.disable_reason, receiver.asked) == (False, KEY_GONE, [])
    assert (await desk.inbox())[0].channel_id == channel_id
    gone_keys.clear()
    await desk.change(channel_id, enabled=True)
    await store.add([draft("b")])
    await until(lambda: len(receiver.asked) == 1)


async def test_hanging_receiver_does_not_delay_others(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer
) -> None:
    receiver.answer = lambda asked: Reply(waits=asked.headers["host"].startswith("slow"))
    slow, _ = await desk.hook(host="slow.test")
    await store.add([draft(f"slow{number}") for number in range(600)])
    await until(lambda: len(receiver.asked) == 16)
    other, _ = await desk.hook(host="other.test")
    await store.add([draft("fast")])
    fast, waiting = await settled(desk, other), await desk.deliveries(slow)
    assert fast.state == DELIVERED
    ended = [each.try_time.ToDatetime() for each in waiting if each.HasField("try_time")]
    assert all(fast.try_time.ToDatetime() < each for each in ended)
    assert len(waiting) == 50, "a page of waiting deliveries"


async def settled(desk: Desk, channel_id: str) -> channel_pb2.ChannelDelivery:
    async def has_ended() -> bool:
        return all(each.HasField("try_time") for each in await desk.deliveries(channel_id))

    await until(has_ended)
    return (await desk.deliveries(channel_id))[0]


async def test_two_replicas_send_each_delivery_once(
    desk: Desk, store: PostgresStore, draft: Drafts, database: Database, egress: GuardedEgress
) -> None:
    await desk.hook()
    running = asyncio.create_task(wired(database, egress).deliveries.run())
    await store.add([draft(str(number)) for number in range(300)])

    async def all_are_there() -> object:
        with suppress(DependencyUnavailable):  # Both are busy with all available connections
            return await database.fetchval("SELECT count(*) = 300 FROM notifier.webhook_deliveries WHERE status = 200")
        return False

    await until(all_are_there)
    await end([running])
    ids = [asked.headers["webhook-id"] for asked in desk.receiver.asked]
    assert len(ids) == len(set(ids)) == 300


async def test_replaced_secret_signs_for_a_day(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer, database: Database
) -> None:
    channel_id, first = await desk.hook()
    rotate = channel_pb2.RotateChannelSecretRequest(channel_id=channel_id)
    second = (await desk.stub.RotateChannelSecret(rotate, metadata=ANN)).secret
    await store.add([draft("a")])
    await desk.delivery(channel_id, tries=1)
    (asked,) = receiver.asked
    assert verified_body(asked, second) == verified_body(asked, first)
    await database.execute("UPDATE notifier.webhooks SET former_times = ARRAY[now()]")
    await store.add([draft("b")])
    await until(lambda: len(receiver.asked) >= 2)
    verified_body(receiver.asked[1], second)
    with pytest.raises(WebhookVerificationError):
        verified_body(receiver.asked[1], first)


async def test_test_delivery_is_sent_once_even_to_a_disabled_channel(desk: Desk, receiver: WebServer) -> None:
    answers(receiver, Reply(status=500))
    channel_id, secret = await desk.hook()
    await desk.change(channel_id, enabled=False)
    await desk.test(channel_id)
    delivery = await desk.delivery(channel_id, tries=1)
    assert (delivery.state, delivery.type, delivery.number) == (DEAD, "channel.test", 0)
    assert verified_body(receiver.asked[0], secret)["data"]["channel_id"] == channel_id


async def test_a_delivery_of_a_dead_process_is_retried_and_its_late_result_is_ignored(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer, database: Database
) -> None:
    receiver.answer = lambda _: Reply(waits=True)
    channel_id, _ = await desk.hook()
    await store.add([draft("a")])
    await until(lambda: len(receiver.asked) >= 1)
    receiver.answer = lambda _: Reply()
    await desk.hurry()  # As if its claim had expired
    lost = await desk.delivery(channel_id, tries=1)
    assert (lost.state, lost.last_error, len(receiver.asked)) == (WAITING, LOST.message, 1)
    await desk.hurry()
    assert (await desk.delivery(channel_id, tries=2)).state == DELIVERED
    receiver.close()  # Hanging requests fail now
    await asyncio.sleep(0.2)
    assert (await desk.delivery(channel_id, tries=2)).state == DELIVERED
