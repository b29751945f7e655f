"""E-mails over a real SMTP server, and confirmation of addresses (NOTE-1)."""

from __future__ import annotations

import asyncio
import email
import email.policy
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from pawl.notifier.deliveries.rules import EMAILS_MAX_AN_HOUR
from pawl.notifier.inbox.rules import Draft
from pawl.notifier.inbox.store import PostgresStore
from pawl.notify.v1 import channel_pb2, notify_pb2
from pawl.server.db.database import Database
from pawl.server.egress.mail import SmtpServer, read_smtp_url
from tests.mail_server import Postbox, mail_server
from tests.poll import until
from tests.rpc.notifier.conftest import ANN, ANN_ELSEWHERE, BOB, DEAD, DELIVERED, SKIPPED, WAITING, Desk, created
from tests.rpc.refusals import reason_of
from tests.rpc.stubs import ChannelServiceAsyncStub

Drafts = Callable[..., Draft]
ADDRESS = "mailto:ann@example.org"
LINK = re.compile(r"Unsubscribe: (https://pawl\.example\.com/unsubscribe/acme/(\S+))")
GATEWAY = (("pawl-store", "acme"), ("pawl-user", "gateway"))


@pytest.fixture
async def postbox() -> AsyncIterator[tuple[Postbox, SmtpServer]]:
    async with mail_server() as (postbox, port):
        yield postbox, read_smtp_url(f"smtp://127.0.0.1:{port}")


@pytest.fixture(name="mail_server")
def server_of_mails(postbox: tuple[Postbox, SmtpServer]) -> SmtpServer:
    return postbox[1]


@pytest.fixture
def box(postbox: tuple[Postbox, SmtpServer]) -> Postbox:
    return postbox[0]


async def has_arrived(box: Postbox, count: int) -> None:
    await until(lambda: len(box.envelopes) >= count)


async def confirm(
    channels: ChannelServiceAsyncStub, channel_id: str, code: str, metadata: tuple[tuple[str, str], ...] = ANN
) -> channel_pb2.Channel:
    request = channel_pb2.ConfirmChannelRequest(channel_id=channel_id, code=code)
    return (await channels.ConfirmChannel(request, metadata=metadata)).channel


async def confirmed(desk: Desk, box: Postbox, **fields: Any) -> str:
    """Return the id of an e-mail channel with a confirmed address and without a delay."""
    made = (await created(desk.stub, ADDRESS, **({"after_seconds": 0} | fields))).channel
    await has_arrived(box, 1)
    await confirm(desk.stub, made.channel_id, box.codes()[-1])
    await desk.delivery(made.channel_id, tries=1)
    box.envelopes.clear()
    await desk.database.execute("DELETE FROM notifier.webhook_deliveries")
    return made.channel_id


async def send_code(channels: ChannelServiceAsyncStub, channel_id: str) -> None:
    await channels.SendChannelCode(channel_pb2.SendChannelCodeRequest(channel_id=channel_id), metadata=ANN)


async def test_unconfirmed_address_gets_no_notifications(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts
) -> None:
    made = await created(desk.stub, ADDRESS, request_id="r1", name="<b>my desk</b>")
    channel = made.channel
    assert (channel.enabled, channel.disable_reason, made.secret) == (False, "the address is not confirmed", "")
    assert channel.after_seconds == 600
    await store.add([draft("a", body="secret")])
    await has_arrived(box, 1)
    assert [envelope.rcpt_tos for envelope in box.envelopes] == [["ann@example.org"]]
    assert "secret" not in box.texts()[0]
    assert "my desk" not in box.texts()[0], "text of a user is not sent to an unconfirmed address"
    assert "nsubscribe" not in str(box.messages()[0]), "link previews of mail programs must not use up the code"
    (code,) = await desk.deliveries(channel.channel_id)
    assert (code.type, await reason_of(desk.resend(code))) == ("channel.code", "DELIVERY_NOT_FOUND")
    assert await reason_of(desk.test(channel.channel_id)) == "INVALID_FIELD"
    assert await reason_of(desk.change(channel.channel_id, enabled=True)) == "INVALID_FIELD"
    for metadata in (BOB, ANN_ELSEWHERE):
        confirming = confirm(desk.stub, channel.channel_id, box.codes()[0], metadata)
        assert await reason_of(confirming) == "CHANNEL_NOT_FOUND"
    found = await confirm(desk.stub, channel.channel_id, box.codes()[0])
    assert (found.enabled, found.disable_reason, found.HasField("confirm_time")) == (True, "", True)
    assert await confirm(desk.stub, channel.channel_id, "other") == found, "it stays confirmed"
    assert (await created(desk.stub, ADDRESS, request_id="r1", name="<b>my desk</b>")).channel == found
    assert len(box.envelopes) == 1


async def test_notification_is_sent_once_and_threaded_by_conversation(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts
) -> None:
    await confirmed(desk, box)
    await store.add([draft("a", body="It is 391."), draft("b")])
    await has_arrived(box, 2)
    messages = [email.message_from_bytes(each.content, policy=email.policy.default) for each in box.envelopes]  # type: ignore[arg-type]
    assert {message["References"] for message in messages} == {"<conv_1.acme@example.com>"}
    assert len({message["Message-ID"] for message in messages}) == 2
    assert {envelope.mail_from for envelope in box.envelopes} == {"pawl@example.com"}
    assert sum("It is 391." in text for text in box.texts()) == 1


async def test_a_temporary_rejection_is_retried_while_a_permanent_one_is_final(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts
) -> None:
    channel_id = await confirmed(desk, box)
    box.data = iter(["451 greylisted"])
    await store.add([draft("a")])
    delivery = await desk.delivery(channel_id, tries=1)
    error = "the mail server refused the message with code 451"
    assert (delivery.state, delivery.status, delivery.last_error) == (WAITING, 451, error)
    await desk.hurry()
    assert (await desk.delivery(channel_id, tries=2)).state == DELIVERED
    await desk.database.execute("DELETE FROM notifier.webhook_deliveries")
    box.recipient = "550 no such user"
    await store.add([draft("b")])
    dead = await desk.delivery(channel_id, tries=1)
    assert (dead.state, dead.status) == (DEAD, 550)
    assert (await desk.channel(channel_id)).HasField("failing_since_time")
    assert (await desk.channel(channel_id)).enabled, "it has not failed for days"


async def test_a_connection_lost_after_the_message_causes_a_resend_with_the_same_id(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts
) -> None:
    """Delivery is at least once, because it is unknown whether the server accepted the first message."""
    channel_id = await confirmed(desk, box)
    box.breaks = True
    await store.add([draft("a")])
    delivery = await desk.delivery(channel_id, tries=1)
    assert (delivery.state, delivery.status) == (WAITING, 0)
    assert not (await desk.channel(channel_id)).HasField("failing_since_time"), "the address is not at fault"
    box.breaks = False
    await desk.hurry()
    assert ((await desk.delivery(channel_id, tries=2)).state, len(box.envelopes)) == (DELIVERED, 2)
    assert len({envelope.content for envelope in box.envelopes}) == 1


async def test_codes_and_attempts_per_code_are_limited(desk: Desk, box: Postbox, database: Database) -> None:
    """The limits prevent mail flooding and code guessing."""
    channel_id = (await created(desk.stub, ADDRESS)).channel.channel_id
    await has_arrived(box, 1)
    (first,) = box.codes()
    wrong = f"{(int(first) + 1) % 10**8:08}"
    for _ in range(5):
        assert await reason_of(confirm(desk.stub, channel_id, wrong)) == "INVALID_FIELD"
    assert await reason_of(confirm(desk.stub, channel_id, first)) == "INVALID_FIELD", "it has been used"
    await send_code(desk.stub, channel_id)
    await has_arrived(box, 2)
    assert await reason_of(confirm(desk.stub, channel_id, first)) == "INVALID_FIELD", "a newer code replaces it"
    await database.execute("UPDATE notifier.webhooks SET code_time = now() - interval '61 minutes'")
    assert await reason_of(confirm(desk.stub, channel_id, box.codes()[1])) == "INVALID_FIELD", "it has expired"
    await desk.stub.DeleteChannel(channel_pb2.DeleteChannelRequest(channel_id=channel_id), metadata=ANN)
    third = (await created(desk.stub, "mailto:Ann@Example.ORG")).channel.channel_id
    await has_arrived(box, 3)
    assert await reason_of(created(desk.stub, ADDRESS)) == "INVALID_FIELD", (
        "three a day per address, for all users together"
    )
    assert await reason_of(send_code(desk.stub, third)) == "INVALID_FIELD"
    bob = channel_pb2.CreateChannelRequest(channel=channel_pb2.Channel(url=ADDRESS))
    assert await reason_of(desk.stub.CreateChannel(bob, metadata=BOB)) == "INVALID_FIELD"
    assert (await confirm(desk.stub, third, box.codes()[2])).enabled
    assert await reason_of(send_code(desk.stub, third)) == "INVALID_FIELD", "there is nothing to confirm"


async def test_addresses_that_get_codes_are_limited_daily_per_user_and_store(
    desk: Desk, database: Database, store: PostgresStore
) -> None:
    sent = "INSERT INTO notifier.codes_sent SELECT 'x' || n || '@example.org', 'acme', $1 FROM generate_series(1, $2) n"
    for user, count in (("ann", 10), ("other", 100)):
        await database.execute(sent, user, count)
        await store.forget(older_than_seconds=86400, limit=1000)
        assert await reason_of(created(desk.stub, ADDRESS)) == "INVALID_FIELD", user
        await database.execute("UPDATE notifier.codes_sent SET sent_time = now() - interval '25 hours'")
        assert (await created(desk.stub, ADDRESS)).channel.channel_id
        await store.forget(older_than_seconds=30 * 86400, limit=1000)
        assert await database.fetchval("SELECT count(*) FROM notifier.codes_sent") == 1, "old ones are deleted"
        await database.execute("DELETE FROM notifier.codes_sent")


async def test_changed_address_is_confirmed_again_and_gets_no_older_notifications(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts
) -> None:
    channel_id = await confirmed(desk, box)
    await store.add([draft("a")])
    sent = await desk.delivery(channel_id, tries=1)
    channel = await desk.change(channel_id, url="mailto:eve@example.net")
    assert (channel.enabled, channel.HasField("confirm_time")) == (False, False)
    await desk.resend(sent)
    await has_arrived(box, 2)
    await until(desk.is_idle)
    states = {each.type: (each.state, each.last_error) for each in await desk.deliveries(channel_id)}
    assert states["run.completed"] == (SKIPPED, "the address is not confirmed")
    assert [envelope.rcpt_tos for envelope in box.envelopes] == [["ann@example.org"], ["eve@example.net"]]
    assert await reason_of(desk.change(channel_id, url="https://example.com/")) == "INVALID_FIELD"
    rotate = desk.stub.RotateChannelSecret(channel_pb2.RotateChannelSecretRequest(channel_id=channel_id), metadata=ANN)
    assert await reason_of(rotate) == "INVALID_FIELD"


async def test_hourly_email_limit_delays_additional_emails(
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
    await until(desk.is_idle)
    (waits,) = [each for each in await desk.deliveries(channel_id) if each.type == "run.completed"]
    assert (waits.state, waits.tries, box.envelopes) == (WAITING, 0, [])


class TestWithoutMailServer:
    @pytest.fixture
    def mail_server(self) -> None:
        """Override the fixture: there is no mail server."""

    async def test_email_channel_is_rejected(self, desk: Desk) -> None:
        assert await reason_of(created(desk.stub, ADDRESS)) == "INVALID_FIELD"


async def unsubscribe_token(desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts, event: str) -> str:
    count = len(box.envelopes)
    await store.add([draft(event)])
    await has_arrived(box, count + 1)
    match = LINK.search(box.texts()[-1])
    assert match is not None
    content = box.envelopes[-1].content
    assert isinstance(content, bytes)
    headers = content.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    assert f"List-Unsubscribe: <{match[1]}>" in headers, "complete and not encoded"
    assert "List-Unsubscribe-Post: List-Unsubscribe=One-Click" in headers
    return match[2]


async def unsubscribe(desk: Desk, token: str, metadata: tuple[tuple[str, str], ...] = GATEWAY) -> None:
    await desk.stub.UnsubscribeChannel(channel_pb2.UnsubscribeChannelRequest(token=token), metadata=metadata)


async def test_unsubscribe_link_disables_the_channel_and_is_announced(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts, database: Database
) -> None:
    channel_id = await confirmed(desk, box, name="my phone")
    hook_id, _ = await desk.hook()
    token = await unsubscribe_token(desk, box, store, draft, "a")
    await desk.change(channel_id, after_seconds=600)
    await store.add([draft("b")])
    await asyncio.gather(*(unsubscribe(desk, token) for _ in range(4)))
    channel = await desk.channel(channel_id)
    reason = "someone used the unsubscribe link in one of its e-mails"
    assert (channel.enabled, channel.disable_reason) == (False, reason)
    notices = [each for each in await desk.inbox() if each.kind == notify_pb2.NOTIFICATION_KIND_CHANNEL_DISABLED]
    assert [(each.channel_id, each.title) for each in notices] == [
        (channel_id, f"Channel my phone was disabled: {reason}")
    ], "once, even after several clicks"
    newest = (await desk.deliveries(channel_id))[0]
    assert (newest.state, newest.last_error) == (DEAD, "the channel was disabled")
    events = "SELECT count(*) FROM notifier.channel_events WHERE type = 'channel.disabled' AND channel_id = $1"
    assert await database.fetchval(events, channel_id) == 1

    async def hook_says_so() -> bool:
        return "channel.disabled" in {each.type for each in await desk.deliveries(hook_id)}

    await until(hook_says_so)
    await store.add([draft("c")])
    assert len(await desk.deliveries(channel_id)) == 2, "no more notifications are sent there"


async def test_token_for_another_store_channel_or_address_has_no_effect(
    desk: Desk, box: Postbox, store: PostgresStore, draft: Drafts
) -> None:
    """All invalid tokens get the same error."""
    channel_id = await confirmed(desk, box)
    hook_id, _ = await desk.hook()
    token = await unsubscribe_token(desk, box, store, draft, "a")
    named, _, signature = token.partition(".")
    assert named == channel_id
    wrong = [
        "",
        ".",
        channel_id,
        f"{channel_id}.",
        f"{channel_id}.{'0' * 64}",
        f"{channel_id}.{signature[:-1]}",
        f"{token}x",
        f"{hook_id}.{signature}",
        f"mail_nope.{signature}",
        f"{channel_id}\0.{signature}",
        f"{channel_id}.\u00e4",
    ]
    for each in wrong:
        assert await reason_of(unsubscribe(desk, each)) == "CHANNEL_NOT_FOUND", each
    assert await reason_of(unsubscribe(desk, token, ANN_ELSEWHERE)) == "CHANNEL_NOT_FOUND"
    assert (await desk.channel(channel_id)).enabled
    await desk.change(channel_id, url="mailto:bob@example.org")
    await has_arrived(box, 2)
    await confirm(desk.stub, channel_id, box.codes()[-1])
    assert await reason_of(unsubscribe(desk, token)) == "CHANNEL_NOT_FOUND", "another address receives it now"
    await desk.stub.DeleteChannel(channel_pb2.DeleteChannelRequest(channel_id=channel_id), metadata=ANN)
    assert await reason_of(unsubscribe(desk, token)) == "CHANNEL_NOT_FOUND"
