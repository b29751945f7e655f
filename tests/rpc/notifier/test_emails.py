"""E-mails over a real SMTP server, and the addresses that they go to (NOTE-1)."""

from __future__ import annotations

import asyncio
import email
import email.policy
import re
from collections.abc import AsyncIterator, Callable, Iterator
from email.message import EmailMessage
from typing import TYPE_CHECKING, Any

import pytest
from aiosmtpd.smtp import SMTP, Envelope

from pawl.chassis.database import Database
from pawl.chassis.mail import SmtpServer, read_smtp_url
from pawl.notifier.adapters import email_sender
from pawl.notifier.adapters.postgres import PostgresStore
from pawl.notifier.domain.delivery import EMAILS_MAX_AN_HOUR
from pawl.notifier.domain.notification import Draft
from pawl.notify.v1 import channel_pb2 as pb
from pawl.notify.v1 import notify_pb2
from tests.poll import until
from tests.rpc.notifier.test_channels import created
from tests.rpc.notifier.test_deliveries import DEAD, DELIVERED, WAITING, Desk
from tests.rpc.notifier.test_inbox import ANN, ANN_ELSEWHERE, BOB, reason_of
from tests.rpc.notifier.test_preferences import SKIPPED, looked_at
from tests.web_server import WebServer

if TYPE_CHECKING:
    from pawl.notify.v1.channel_pb2_grpc import ChannelServiceAsyncStub
    from pawl.notify.v1.notify_pb2_grpc import NotifyServiceAsyncStub

Drafts = Callable[..., Draft]
ADDRESS = "mailto:ann@example.org"
CODE = re.compile(r"pawl notify confirm (\S+) (\d{8})")
OK = "250 OK"


class Postbox:
    """A mail server's end: it answers RCPT and DATA as it is told, and keeps what it has taken."""

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []
        self.recipient = OK
        self.data: Iterator[str] = iter(())
        self.breaks = False
        self.falls_silent = False

    async def handle_RCPT(self, _server: Any, _session: Any, envelope: Envelope, address: str, _options: Any) -> str:
        if self.recipient == OK:
            envelope.rcpt_tos.append(address)
        return self.recipient

    async def handle_DATA(self, server: SMTP, _session: Any, envelope: Envelope) -> str:
        self.envelopes.append(envelope)
        if self.breaks:
            assert isinstance(server.transport, asyncio.WriteTransport)
            server.transport.abort()
        return next(self.data, OK)

    async def handle_QUIT(self, _server: Any, _session: Any, _envelope: Envelope) -> str:
        if self.falls_silent:
            await asyncio.Event().wait()
        return "221 Bye"

    def texts(self) -> list[str]:
        """What has come, as text."""
        return [_text(envelope) for envelope in self.envelopes]

    def codes(self) -> list[str]:
        """The codes that have come."""
        return [match[2] for text in self.texts() if (match := CODE.search(text))]


def _text(envelope: Envelope) -> str:
    assert isinstance(envelope.content, bytes)
    message = email.message_from_bytes(envelope.content, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    body = message.get_body(("plain",))
    assert body is not None
    return str(body.get_content())


@pytest.fixture
async def postbox() -> AsyncIterator[tuple[Postbox, SmtpServer]]:
    postbox = Postbox()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(postbox, hostname="mail.example.org", loop=loop), "127.0.0.1", 0)
    async with server:
        yield postbox, read_smtp_url(f"smtp://127.0.0.1:{server.sockets[0].getsockname()[1]}")


@pytest.fixture
def mail_server(postbox: tuple[Postbox, SmtpServer]) -> SmtpServer:
    return postbox[1]


@pytest.fixture
def box(postbox: tuple[Postbox, SmtpServer]) -> Postbox:
    return postbox[0]


@pytest.fixture
def desk(
    channels: ChannelServiceAsyncStub, stub: NotifyServiceAsyncStub, receiver: WebServer, database: Database
) -> Desk:
    return Desk(channels, stub, receiver, database)


async def has_come(box: Postbox, count: int) -> None:
    async def there() -> bool:
        return len(box.envelopes) >= count

    await until(there)


async def confirm(
    channels: ChannelServiceAsyncStub, channel_id: str, code: str, metadata: tuple[tuple[str, str], ...] = ANN
) -> pb.Channel:
    request = pb.ConfirmChannelRequest(channel_id=channel_id, code=code)
    return (await channels.ConfirmChannel(request, metadata=metadata)).channel


async def confirmed(desk: Desk, box: Postbox, **fields: Any) -> str:
    """The id of an e-mail that tells at once, whose address is confirmed."""
    made = (await created(desk.stub, ADDRESS, **({"after_seconds": 0} | fields))).channel
    await has_come(box, 1)
    await confirm(desk.stub, made.channel_id, box.codes()[-1])
    await desk.delivery(made.channel_id, tries=1)
    box.envelopes.clear()
    await desk.database.execute("DELETE FROM notifier.webhook_deliveries")
    return made.channel_id


async def send_code(channels: ChannelServiceAsyncStub, channel_id: str) -> None:
    await channels.SendChannelCode(pb.SendChannelCodeRequest(channel_id=channel_id), metadata=ANN)


async def test_an_address_is_told_nothing_before_it_is_confirmed(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts
) -> None:
    made = await created(desk.stub, ADDRESS, request_id="r1", name="<b>my desk</b>")
    channel = made.channel
    assert (channel.enabled, channel.disable_reason, made.secret) == (False, "its address is not confirmed", "")
    assert channel.after_seconds == 600
    await store.add([draft("a", body="secret")])
    await has_come(box, 1)
    assert [envelope.rcpt_tos for envelope in box.envelopes] == [["ann@example.org"]]
    assert "secret" not in box.texts()[0]
    assert "my desk" not in box.texts()[0], "what a user writes goes to no stranger"
    test = desk.stub.TestChannel(pb.TestChannelRequest(channel_id=channel.channel_id), metadata=ANN)
    assert await reason_of(test) == "INVALID_FIELD"
    enable = pb.UpdateChannelRequest(channel_id=channel.channel_id, enabled=True)
    assert await reason_of(desk.stub.UpdateChannel(enable, metadata=ANN)) == "INVALID_FIELD"
    for metadata in (BOB, ANN_ELSEWHERE):
        confirming = confirm(desk.stub, channel.channel_id, box.codes()[0], metadata)
        assert await reason_of(confirming) == "CHANNEL_NOT_FOUND"
    found = await confirm(desk.stub, channel.channel_id, box.codes()[0])
    assert (found.enabled, found.disable_reason, found.HasField("confirm_time")) == (True, "", True)
    assert await confirm(desk.stub, channel.channel_id, "other") == found, "it stays so"
    again = await created(desk.stub, ADDRESS, request_id="r1", name="<b>my desk</b>")
    assert again.channel == found
    assert len(box.envelopes) == 1


async def test_a_notification_is_sent_once_and_those_of_a_conversation_are_one_thread(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts
) -> None:
    await confirmed(desk, box)
    await store.add([draft("a", body="It is 391."), draft("b")])
    await has_come(box, 2)
    messages = [email.message_from_bytes(each.content, policy=email.policy.default) for each in box.envelopes]  # type: ignore[arg-type]
    assert {message["References"] for message in messages} == {"<conv_1.acme@example.com>"}
    assert len({message["Message-ID"] for message in messages}) == 2
    assert {envelope.mail_from for envelope in box.envelopes} == {"pawl@example.com"}
    assert sum("It is 391." in text for text in box.texts()) == 1


async def test_what_is_refused_for_now_is_tried_again_and_what_is_refused_for_good_is_dead(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts
) -> None:
    channel_id = await confirmed(desk, box)
    box.data = iter(["451 greylisted"])
    await store.add([draft("a")])
    delivery = await desk.delivery(channel_id, tries=1)
    told = "the mail server refused the message with code 451"
    assert (delivery.state, delivery.status, delivery.last_error) == (WAITING, 451, told)
    await desk.hurry()
    assert (await desk.delivery(channel_id, tries=2)).state == DELIVERED
    await desk.database.execute("DELETE FROM notifier.webhook_deliveries")
    box.recipient = "550 no such user"
    await store.add([draft("b")])
    dead = await desk.delivery(channel_id, tries=1)
    assert (dead.state, dead.status) == (DEAD, 550)
    assert (await desk.channel(channel_id)).HasField("failing_since_time")
    assert (await desk.channel(channel_id)).enabled, "it has not failed for days"


async def test_an_address_that_is_gone_for_days_is_disabled_with_a_notice(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts
) -> None:
    channel_id = await confirmed(desk, box)
    await desk.database.execute("UPDATE notifier.webhooks SET failing_since = now() - interval '4 days'")
    box.recipient = "550 no such user"
    await store.add([draft("a")])

    async def is_disabled() -> bool:
        return not (await desk.channel(channel_id)).enabled

    await until(is_disabled)
    newest = (await desk.inbox())[0]
    assert (newest.kind, newest.channel_id) == (notify_pb2.NOTIFICATION_KIND_CHANNEL_DISABLED, channel_id)


async def test_a_connection_that_breaks_after_the_message_sends_it_again_under_the_same_id(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts
) -> None:
    """At least once: nobody knows whether it was taken."""
    channel_id = await confirmed(desk, box)
    box.breaks = True
    await store.add([draft("a")])
    delivery = await desk.delivery(channel_id, tries=1)
    assert (delivery.state, delivery.status) == (WAITING, 0)
    assert not (await desk.channel(channel_id)).HasField("failing_since_time"), "it is no fault of the address"
    box.breaks = False
    await desk.hurry()
    assert (await desk.delivery(channel_id, tries=2)).state == DELIVERED
    assert len(box.envelopes) == 2
    assert len({envelope.content for envelope in box.envelopes}) == 1


async def test_a_server_that_falls_silent_after_it_took_the_message_has_it(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(email_sender, "TRY_SECONDS", 5.0)
    channel_id = await confirmed(desk, box)
    box.falls_silent = True
    await store.add([draft("a")])
    assert (await desk.delivery(channel_id, tries=1)).state == DELIVERED


async def test_codes_are_few_and_tries_with_one_too(desk: Desk, box: Postbox, database: Database) -> None:
    """Nobody can fill the post box of another one, nor guess."""
    channel_id = (await created(desk.stub, ADDRESS)).channel.channel_id
    await has_come(box, 1)
    (first,) = box.codes()
    wrong = f"{(int(first) + 1) % 10**8:08}"
    for _ in range(5):
        assert await reason_of(confirm(desk.stub, channel_id, wrong)) == "INVALID_FIELD"
    assert await reason_of(confirm(desk.stub, channel_id, first)) == "INVALID_FIELD", "it is used up"
    await send_code(desk.stub, channel_id)
    await has_come(box, 2)
    assert await reason_of(confirm(desk.stub, channel_id, first)) == "INVALID_FIELD", "there is another one"
    await database.execute("UPDATE notifier.webhooks SET code_time = now() - interval '61 minutes'")
    assert await reason_of(confirm(desk.stub, channel_id, box.codes()[1])) == "INVALID_FIELD", "it is too old"
    await desk.stub.DeleteChannel(pb.DeleteChannelRequest(channel_id=channel_id), metadata=ANN)
    third = (await created(desk.stub, "mailto:Ann@Example.ORG")).channel.channel_id
    await has_come(box, 3)
    assert await reason_of(created(desk.stub, ADDRESS)) == "INVALID_FIELD", "three a day to an address, whoever asks"
    assert await reason_of(send_code(desk.stub, third)) == "INVALID_FIELD"
    bob = pb.CreateChannelRequest(channel=pb.Channel(url=ADDRESS))
    assert await reason_of(desk.stub.CreateChannel(bob, metadata=BOB)) == "INVALID_FIELD"
    assert (await confirm(desk.stub, third, box.codes()[2])).enabled
    assert await reason_of(send_code(desk.stub, third)) == "INVALID_FIELD", "there is nothing to confirm"


async def test_a_code_is_not_sent_again_as_a_delivery(desk: Desk, box: Postbox) -> None:
    """There would be no end of them."""
    channel_id = (await created(desk.stub, ADDRESS)).channel.channel_id
    code = await desk.delivery(channel_id, tries=1)
    assert (code.type, code.state) == ("channel.code", DELIVERED)
    resend = pb.ResendDeliveryRequest(delivery_id=code.delivery_id)
    assert await reason_of(desk.stub.ResendDelivery(resend, metadata=ANN)) == "DELIVERY_NOT_FOUND"


async def test_codes_that_were_sent_are_forgotten_after_a_day(
    desk: Desk, database: Database, store: PostgresStore
) -> None:
    await created(desk.stub, ADDRESS)
    left = "SELECT count(*) FROM notifier.codes_sent"
    await store.forget(older_than_seconds=86400, limit=10)
    assert await database.fetchval(left) == 1
    await database.execute("UPDATE notifier.codes_sent SET sent_time = now() - interval '25 hours'")
    await store.forget(older_than_seconds=30 * 86400, limit=10)
    assert await database.fetchval(left) == 0


@pytest.mark.parametrize(("user", "count"), [("ann", 10), ("other", 100)])
async def test_a_user_and_a_store_have_codes_sent_to_few_addresses(
    desk: Desk, database: Database, user: str, count: int
) -> None:
    sent = "INSERT INTO notifier.codes_sent SELECT 'x' || n || '@example.org', 'acme', $1 FROM generate_series(1, $2) n"
    await database.execute(sent, user, count)
    assert await reason_of(created(desk.stub, ADDRESS)) == "INVALID_FIELD"
    await database.execute("UPDATE notifier.codes_sent SET sent_time = now() - interval '25 hours'")
    assert (await created(desk.stub, ADDRESS)).channel.channel_id


async def test_a_new_address_is_confirmed_anew_and_gets_nothing_of_before(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts
) -> None:
    channel_id = await confirmed(desk, box)
    await store.add([draft("a")])
    sent = await desk.delivery(channel_id, tries=1)
    moved = pb.UpdateChannelRequest(channel_id=channel_id, url="mailto:eve@example.net")
    channel = (await desk.stub.UpdateChannel(moved, metadata=ANN)).channel
    assert (channel.enabled, channel.HasField("confirm_time")) == (False, False)
    resend = pb.ResendDeliveryRequest(delivery_id=sent.delivery_id)
    await desk.stub.ResendDelivery(resend, metadata=ANN)
    await has_come(box, 2)
    await looked_at_all(desk)
    states = {each.type: (each.state, each.last_error) for each in await desk.deliveries(channel_id)}
    assert states["run.completed"] == (SKIPPED, "its address is not confirmed")
    assert [envelope.rcpt_tos for envelope in box.envelopes] == [["ann@example.org"], ["eve@example.net"]]
    webhook = pb.UpdateChannelRequest(channel_id=channel_id, url="https://example.com/")
    assert await reason_of(desk.stub.UpdateChannel(webhook, metadata=ANN)) == "INVALID_FIELD"
    rotate = desk.stub.RotateChannelSecret(pb.RotateChannelSecretRequest(channel_id=channel_id), metadata=ANN)
    assert await reason_of(rotate) == "INVALID_FIELD"


async def looked_at_all(desk: Desk) -> None:
    async def none_is_due() -> bool:
        due = "SELECT count(*) FROM notifier.webhook_deliveries WHERE claimed OR due_time <= now()"
        return bool(await desk.database.fetchval(due) == 0)

    await until(none_is_due)


async def test_who_was_sent_enough_within_an_hour_waits(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts, database: Database
) -> None:
    channel_id = await confirmed(desk, box)
    await database.execute(
        "INSERT INTO notifier.webhook_deliveries"
        " (delivery_id, webhook_id, store_id, user_id, type, body, state, due_time, try_time)"
        " SELECT 'dlv_' || n, $1, 'acme', 'ann', 'channel.test', '{}', 'delivered', NULL, now()"
        " FROM generate_series(1, $2::int) AS n",
        channel_id,
        EMAILS_MAX_AN_HOUR,
    )
    await store.add([draft("a")])
    await looked_at_all(desk)
    (waits,) = [each for each in await desk.deliveries(channel_id) if each.type == "run.completed"]
    assert (waits.state, waits.tries) == (WAITING, 0)
    assert box.envelopes == []


async def test_an_email_waits_ten_minutes_by_default(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts
) -> None:
    channel_id = await confirmed(desk, box, after_seconds=None)
    await store.add([draft("a")])
    waits = await looked_at(desk, channel_id)
    pause = waits.next_try_time.ToDatetime() - waits.create_time.ToDatetime()
    assert (waits.state, pause.total_seconds()) == (WAITING, 600)


class TestWithoutMailServer:
    """A deployment that sends no e-mail."""

    @pytest.fixture
    def mail_server(self) -> None:
        """None."""

    async def test_no_address_can_be_given(self, desk: Desk) -> None:
        assert await reason_of(created(desk.stub, ADDRESS)) == "INVALID_FIELD"
