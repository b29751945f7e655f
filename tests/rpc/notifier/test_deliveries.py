"""Deliveries to a real receiver, which checks what comes with the library of the specification (NOTE-1)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from pawl.chassis.database import Database
from pawl.chassis.egress import GuardedEgress
from pawl.chassis.erasures import ErasurePart
from pawl.chassis.ids import ConversationId, StoreId
from pawl.chassis.lookups import Lookups
from pawl.chassis.tasks import end
from pawl.errors import DependencyUnavailable
from pawl.notifier.adapters import webhook_sender
from pawl.notifier.adapters.postgres import PostgresStore
from pawl.notifier.domain.delivery import LOST
from pawl.notifier.domain.notification import Draft
from pawl.notify.v1 import channel_pb2 as pb
from pawl.notify.v1 import notify_pb2
from tests.poll import until
from tests.rpc.notifier.conftest import wired
from tests.rpc.notifier.test_channels import created
from tests.rpc.notifier.test_inbox import ANN, reason_of
from tests.web_server import Asked, Reply, WebServer

if TYPE_CHECKING:
    from pawl.notify.v1.channel_pb2_grpc import ChannelServiceAsyncStub
    from pawl.notify.v1.notify_pb2_grpc import NotifyServiceAsyncStub

Drafts = Callable[..., Draft]
DELIVERED, DEAD, WAITING = (
    pb.CHANNEL_DELIVERY_STATE_DELIVERED,
    pb.CHANNEL_DELIVERY_STATE_DEAD,
    pb.CHANNEL_DELIVERY_STATE_WAITING,
)


class Desk:
    """What a user does with a channel and sees of it."""

    def __init__(
        self,
        stub: ChannelServiceAsyncStub,
        inboxes: NotifyServiceAsyncStub,
        receiver: WebServer,
        database: Database,
    ) -> None:
        self.stub = stub
        self.inboxes = inboxes
        self.receiver = receiver
        self.database = database

    async def hook(self, path: str = "/", host: str = "127.0.0.1", **fields: Any) -> tuple[str, str]:
        """The id and secret of a new channel."""
        made = await created(self.stub, f"http://{host}:{self.receiver.port}{path}", **fields)
        return made.channel.channel_id, made.secret

    async def channel(self, channel_id: str) -> pb.Channel:
        return (await self.stub.GetChannel(pb.GetChannelRequest(channel_id=channel_id), metadata=ANN)).channel

    async def deliveries(self, channel_id: str) -> list[pb.ChannelDelivery]:
        request = pb.ListDeliveriesRequest(channel_id=channel_id)
        return list((await self.stub.ListDeliveries(request, metadata=ANN)).deliveries)

    async def delivery(self, channel_id: str, *, tries: int) -> pb.ChannelDelivery:
        """The one delivery, once a try of that number has ended."""

        async def has_ended() -> bool:
            (each,) = await self.deliveries(channel_id)
            return each.tries == tries and (await self.database.fetchval(_AT_WORK)) == 0

        await until(has_ended)
        (found,) = await self.deliveries(channel_id)
        return found

    async def inbox(self) -> list[notify_pb2.Notification]:
        """The notifications of the user, newest first."""
        request = notify_pb2.ListNotificationsRequest()
        return list((await self.inboxes.ListNotifications(request, metadata=ANN)).notifications)

    async def hurry(self) -> None:
        """Let the time of what waits come."""
        await self.database.execute("UPDATE notifier.webhook_deliveries SET due_time = now() WHERE due_time > now()")


_AT_WORK = "SELECT count(*) FROM notifier.webhook_deliveries WHERE claimed OR due_time <= now()"
_ALL_TRIED = "SELECT bool_and(tries > 0 AND NOT claimed) FROM notifier.webhook_deliveries"
_ALL_TRIED_ONCE = "SELECT bool_and(tries = 1 AND NOT claimed) FROM notifier.webhook_deliveries"


@pytest.fixture
def desk(
    channels: ChannelServiceAsyncStub, stub: NotifyServiceAsyncStub, receiver: WebServer, database: Database
) -> Desk:
    return Desk(channels, stub, receiver, database)


def answers(receiver: WebServer, *replies: Reply) -> None:
    """Have the receiver give these answers, one by one, the last one for ever."""
    following: Iterator[Reply] = iter(replies[:-1])
    receiver.answer = lambda _: next(following, replies[-1])


def told(asked: Asked, secret: str) -> Any:
    """What a request says, if it is signed with the secret."""
    assert asked.headers["content-type"] == "application/json"
    return Webhook(secret).verify(asked.body, dict(asked.headers))


async def test_a_notification_is_delivered_once_signed(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer
) -> None:
    channel_id, secret = await desk.hook("/ann?x=1")
    for _ in range(2):
        await store.add([draft("a", body="It is 391."), draft("b", user="bob"), draft("c", store="other")])
    delivery = await desk.delivery(channel_id, tries=1)
    (asked,) = receiver.asked
    body = told(asked, secret)
    assert body["type"] == delivery.type == "run.completed"
    assert body["data"]["title"] == "About a"
    assert body["data"]["body"] == "It is 391."
    assert asked.headers["webhook-id"] == delivery.delivery_id
    assert asked.target == "/ann?x=1"
    assert (delivery.state, delivery.status, delivery.number, delivery.last_error) == (DELIVERED, 200, 1, "")
    with pytest.raises(WebhookVerificationError):
        told(asked, "whsec_" + "A" * 43 + "=")


async def test_only_what_is_asked_for_is_told(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer
) -> None:
    failures, _ = await desk.hook(kinds=[notify_pb2.NOTIFICATION_KIND_RUN_FAILED])
    all_kinds, _ = await desk.hook()
    await store.add([draft("a")])
    await desk.delivery(all_kinds, tries=1)
    assert await desk.deliveries(failures) == []


async def test_a_receiver_that_fails_gets_the_same_again(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer
) -> None:
    answers(receiver, Reply(status=500), Reply(breaks=True), Reply())
    channel_id, secret = await desk.hook()
    await store.add([draft("a")])
    first = await desk.delivery(channel_id, tries=1)
    assert (first.state, first.status, first.last_error) == (WAITING, 500, "the receiver answered 500")
    pause = first.next_try_time.ToDatetime() - first.try_time.ToDatetime()
    assert 4.5 <= pause.total_seconds() <= 5.5
    assert (await desk.channel(channel_id)).HasField("failing_since_time")
    await desk.hurry()
    second = await desk.delivery(channel_id, tries=2)
    assert (second.state, second.status) == (WAITING, 0)
    await desk.hurry()
    third = await desk.delivery(channel_id, tries=3)
    assert (third.state, third.last_error) == (DELIVERED, "")
    assert not (await desk.channel(channel_id)).HasField("failing_since_time")
    assert len({(asked.headers["webhook-id"], asked.body) for asked in receiver.asked}) == 1
    assert [told(asked, secret)["type"] for asked in receiver.asked] == ["run.completed"] * 3


async def test_a_receiver_says_when_it_is_tried_again(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer
) -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(hours=2), usegmt=True)
    answers(receiver, *[Reply(status=429, headers={"Retry-After": each}) for each in ("600", later, "tomorrow")])
    channel_id, _ = await desk.hook()
    await store.add([draft("a")])
    for tries, seconds in enumerate((600, 7200, 1500), start=1):
        delivery = await desk.delivery(channel_id, tries=tries)
        pause = delivery.next_try_time.ToDatetime() - delivery.try_time.ToDatetime()
        assert 0.9 * seconds - 60 <= pause.total_seconds() <= 1.1 * seconds
        await desk.hurry()


async def test_a_delivery_is_dead_after_the_last_try_and_can_be_sent_again(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer
) -> None:
    answers(receiver, *[Reply(status=503)] * 10, Reply())
    channel_id, _ = await desk.hook()
    await store.add([draft("a")])
    for tries in range(1, 11):
        delivery = await desk.delivery(channel_id, tries=tries)
        await desk.hurry()
    assert delivery.state == DEAD
    assert (await desk.channel(channel_id)).enabled, "it has not failed for days"
    resend = pb.ResendDeliveryRequest(delivery_id=delivery.delivery_id)
    again = (await desk.stub.ResendDelivery(resend, metadata=ANN)).delivery
    assert (again.state, again.tries) == (WAITING, 0)
    assert (await desk.delivery(channel_id, tries=1)).state == DELIVERED
    assert len({asked.headers["webhook-id"] for asked in receiver.asked}) == 1


async def test_what_is_gone_is_disabled_and_its_user_is_told(
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
    assert newest.kind == notify_pb2.NOTIFICATION_KIND_CHANNEL_DISABLED
    assert newest.channel_id == gone
    assert newest.title.startswith("Channel pager was disabled: ")

    async def other_has_both() -> bool:
        return sorted(each.type for each in await desk.deliveries(other)) == ["channel.disabled", "run.completed"]

    await until(other_has_both)
    await store.add([draft("b")])
    assert len(await desk.deliveries(gone)) == 1, "it is told nothing more"
    change = pb.UpdateChannelRequest(channel_id=gone, enabled=True, url=f"http://127.0.0.1:{receiver.port}/new")
    changed = (await desk.stub.UpdateChannel(change, metadata=ANN)).channel
    assert (changed.enabled, changed.disable_reason) == (True, "")


async def test_what_has_failed_for_days_is_disabled_with_all_that_waits(
    desk: Desk,
    store: PostgresStore,
    draft: Drafts,
    receiver: WebServer,
    database: Database,
) -> None:
    answers(receiver, Reply(status=500))
    channel_id, _ = await desk.hook()
    await store.add([draft("a"), draft("b")])

    async def both_wait() -> bool:
        return bool(
            await database.fetchval("SELECT bool_and(tries = 1 AND NOT claimed) FROM notifier.webhook_deliveries")
        )

    await until(both_wait)
    await database.execute("UPDATE notifier.webhooks SET failing_since = now() - interval '3 days'")
    await database.execute("UPDATE notifier.webhook_deliveries SET tries = 9, due_time = now() WHERE number = 1")

    async def is_disabled() -> bool:
        return not (await desk.channel(channel_id)).enabled

    await until(is_disabled)
    assert {each.number: (each.state, each.last_error) for each in await desk.deliveries(channel_id)} == {
        1: (DEAD, "the receiver answered 500"),
        2: (DEAD, "the channel was disabled"),
    }
    newest, *_ = await desk.inbox()
    assert newest.kind == notify_pb2.NOTIFICATION_KIND_CHANNEL_DISABLED


async def test_redirects_are_not_followed(desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer) -> None:
    answers(receiver, Reply(status=307, headers={"Location": "/elsewhere"}))
    channel_id, _ = await desk.hook()
    await store.add([draft("a")])
    delivery = await desk.delivery(channel_id, tries=1)
    assert (delivery.state, delivery.status) == (WAITING, 307)
    assert [asked.target for asked in receiver.asked] == ["/"]


async def test_an_answer_is_read_no_further_than_its_status(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer
) -> None:
    answers(receiver, Reply(b"x", is_endless=True))
    channel_id, _ = await desk.hook()
    await store.add([draft("a")])
    assert (await desk.delivery(channel_id, tries=1)).state == DELIVERED


async def test_a_receiver_that_hangs_holds_up_nobody_else(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer
) -> None:
    receiver.answer = lambda asked: Reply(waits=asked.headers["host"].startswith("slow"))
    slow, _ = await desk.hook(host="slow.test")
    await store.add([draft(f"slow{number}") for number in range(600)])

    async def hangs() -> bool:
        return len(receiver.asked) == 16

    await until(hangs)
    other, _ = await desk.hook(host="other.test")
    await store.add([draft("fast")])
    fast, waiting = await settled(desk, other), await desk.deliveries(slow)
    assert fast.state == DELIVERED
    ended = [each.try_time.ToDatetime() for each in waiting if each.HasField("try_time")]
    assert all(fast.try_time.ToDatetime() < each for each in ended)
    assert len(waiting) == 50, "a page of what waits"


async def test_a_name_that_is_resolved_slowly_keeps_the_place_of_its_try(
    desk: Desk, store: PostgresStore, draft: Drafts, egress: GuardedEgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is looked up by a thread, which goes on when the try is over."""
    answered, asked = asyncio.Event(), []

    async def resolve(host: str, _: int) -> list[str]:
        asked.append(host)
        if host == "slow.test":
            await answered.wait()
        return ["127.0.0.1"]

    monkeypatch.setattr(webhook_sender, "TRY_SECONDS", 0.5)
    monkeypatch.setattr(egress, "_lookups", Lookups(resolve))
    slow, _ = await desk.hook(host="slow.test")
    await store.add([draft(f"slow{number}") for number in range(40)])

    async def have_ended() -> bool:
        return sum(bool(each.last_error) for each in await desk.deliveries(slow)) >= 16

    await until(have_ended)
    other, _ = await desk.hook(host="other.test")
    await store.add([draft("fast")])
    assert (await settled(desk, other)).state == DELIVERED
    assert asked.count("slow.test") == 16
    answered.set()

    async def all_are_tried() -> bool:
        return await desk.database.fetchval(_ALL_TRIED) is True

    await until(all_are_tried)


async def settled(desk: Desk, channel_id: str) -> pb.ChannelDelivery:
    async def has_ended() -> bool:
        return all(each.HasField("try_time") for each in await desk.deliveries(channel_id))

    await until(has_ended)
    return (await desk.deliveries(channel_id))[0]


async def test_two_replicas_send_each_delivery_once(
    desk: Desk, store: PostgresStore, draft: Drafts, database: Database, egress: GuardedEgress
) -> None:
    channel_id, _ = await desk.hook()
    second = wired(database, egress)
    running = asyncio.create_task(second.deliveries.run())
    await store.add([draft(str(number)) for number in range(1000)])

    async def all_are_there() -> bool:
        try:
            count = await database.fetchval("SELECT count(*) FROM notifier.webhook_deliveries WHERE status = 200")
        except DependencyUnavailable:
            return False  # Both are at work with all connections that there are.
        return bool(count == 1000)

    await until(all_are_there)
    await end([running])
    ids = [asked.headers["webhook-id"] for asked in desk.receiver.asked]
    assert len(ids) == len(set(ids)) == 1000
    page = await desk.stub.ListDeliveries(pb.ListDeliveriesRequest(channel_id=channel_id, page_size=200), metadata=ANN)
    seen = {each.delivery_id for each in page.deliveries}
    while page.next_page_token:
        request = pb.ListDeliveriesRequest(channel_id=channel_id, page_size=200, page_token=page.next_page_token)
        page = await desk.stub.ListDeliveries(request, metadata=ANN)
        assert not seen & {each.delivery_id for each in page.deliveries}
        seen |= {each.delivery_id for each in page.deliveries}
    assert seen == set(ids)


async def test_a_page_token_of_something_else_is_refused(desk: Desk) -> None:
    channel_id, _ = await desk.hook()
    for token in ("all-1", "deliveries-1", f"deliveries-{'9' * 16}-msg_1" + "!"):
        request = pb.ListDeliveriesRequest(channel_id=channel_id, page_token=token)
        assert await reason_of(desk.stub.ListDeliveries(request, metadata=ANN)) == "INVALID_PAGE_TOKEN"


async def test_a_secret_that_was_replaced_signs_for_a_day(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer, database: Database
) -> None:
    channel_id, first = await desk.hook()
    rotate = pb.RotateChannelSecretRequest(channel_id=channel_id)
    second = (await desk.stub.RotateChannelSecret(rotate, metadata=ANN)).secret
    await store.add([draft("a")])
    await desk.delivery(channel_id, tries=1)
    (asked,) = receiver.asked
    assert told(asked, second) == told(asked, first)
    await database.execute("UPDATE notifier.webhooks SET former_times = ARRAY[now()]")
    await store.add([draft("b")])
    await until_asked(receiver, 2)
    told(receiver.asked[1], second)
    with pytest.raises(WebhookVerificationError):
        told(receiver.asked[1], first)


async def until_asked(receiver: WebServer, count: int) -> None:
    async def has_come() -> bool:
        return len(receiver.asked) >= count

    await until(has_come)


async def test_a_test_is_sent_once_also_to_what_is_disabled(desk: Desk, receiver: WebServer) -> None:
    answers(receiver, Reply(status=500))
    channel_id, secret = await desk.hook()
    change = pb.UpdateChannelRequest(channel_id=channel_id, enabled=False)
    await desk.stub.UpdateChannel(change, metadata=ANN)
    await desk.stub.TestChannel(pb.TestChannelRequest(channel_id=channel_id), metadata=ANN)
    delivery = await desk.delivery(channel_id, tries=1)
    assert (delivery.state, delivery.type, delivery.number) == (DEAD, "channel.test", 0)
    assert told(receiver.asked[0], secret)["data"]["channel_id"] == channel_id


async def test_what_was_claimed_by_a_process_that_died_is_tried_again_and_its_late_word_does_not_count(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer, database: Database
) -> None:
    receiver.answer = lambda _: Reply(waits=True)
    channel_id, _ = await desk.hook()
    await store.add([draft("a")])
    await until_asked(receiver, 1)
    receiver.answer = lambda _: Reply()
    await desk.hurry()  # As if its claim were over.
    lost = await desk.delivery(channel_id, tries=1)
    assert (lost.state, lost.last_error, len(receiver.asked)) == (WAITING, LOST.message, 1)
    await desk.hurry()
    assert (await desk.delivery(channel_id, tries=2)).state == DELIVERED
    receiver.close()  # What hung breaks now.
    await asyncio.sleep(0.2)
    assert (await desk.delivery(channel_id, tries=2)).state == DELIVERED


async def test_what_is_told_of_an_erased_conversation_goes_with_it(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer, database: Database
) -> None:
    """I13."""
    answers(receiver, Reply(status=500))
    channel_id, _ = await desk.hook()
    await store.add([draft("a", body="zanzibar")])
    await desk.delivery(channel_id, tries=1)
    part = ErasurePart(
        store_id=StoreId("acme"), conversation_id=ConversationId("conv_1"), run_ids=["run_1"], call_ids=[]
    )
    await store.erase(part)
    assert await desk.deliveries(channel_id) == []
    await store.add([draft("b", body="zanzibar")])
    assert await database.fetchval("SELECT count(*) FROM notifier.webhook_deliveries") == 0


async def test_deliveries_are_forgotten_with_their_notifications(
    desk: Desk, store: PostgresStore, draft: Drafts, database: Database
) -> None:
    channel_id, _ = await desk.hook()
    await store.add([draft("a")])
    await desk.stub.TestChannel(pb.TestChannelRequest(channel_id=channel_id), metadata=ANN)
    await settled(desk, channel_id)
    await database.execute("UPDATE notifier.notifications SET insert_time = now() - interval '2 days'")
    await database.execute("UPDATE notifier.webhook_deliveries SET insert_time = now() - interval '2 days'")
    await store.forget(older_than_seconds=86400, limit=10)
    assert await desk.deliveries(channel_id) == []


async def test_a_deleted_channel_is_told_nothing_more(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer, database: Database
) -> None:
    answers(receiver, Reply(status=500))
    channel_id, _ = await desk.hook()
    await store.add([draft("a")])
    await desk.delivery(channel_id, tries=1)
    await desk.stub.DeleteChannel(pb.DeleteChannelRequest(channel_id=channel_id), metadata=ANN)
    assert await database.fetchval("SELECT count(*) FROM notifier.webhook_deliveries") == 0
    assert json.loads(receiver.asked[0].body)["type"] == "run.completed"
