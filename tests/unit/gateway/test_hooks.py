"""Webhooks as they come in: proxies add headers, and none by which a webhook is judged may be there twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pawl.agent.v1.trigger_pb2 import DeliverWebhookRequest
from tests.unit.gateway.test_app import Door
from tests.unit.gateway.test_server import served

pytestmark = pytest.mark.asyncio

GIVEN = {
    "Host": "localhost",
    "Content-Type": "application/json",
    "Content-Length": "12",
    "Authorization": "Bearer whsec_1",
    "Webhook-Id": "msg_1",
    "Webhook-Timestamp": "1800000000",
    "Webhook-Signature": "v1,a v1,b",
}


@pytest.fixture
def door(tmp_path: Path) -> Door:
    keys = tmp_path / "keys.json"
    keys.write_text('{"acme": "key"}', encoding="utf-8")
    return Door(gateway_webhook_keys_file=keys)


@pytest.fixture
def webhooks(door: Door) -> list[DeliverWebhookRequest]:
    """Those that have got through."""
    door.channel.webhooks = []
    return door.channel.webhooks


async def sent(door: Door, *more: tuple[str, str], order: int = 7) -> bytes:
    """Send a webhook with headers as they are, and return the answer."""
    head = "".join(f"{name}: {value}\r\n" for name, value in (*GIVEN.items(), *more, ("Connection", "close")))
    async with served(door.app) as server:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f'POST /hooks/acme/trg_1 HTTP/1.1\r\n{head}\r\n{{"order": {order}}}'.encode())
        answer = await reader.read()
        writer.close()
    return answer


async def test_the_same_body_is_the_same_event_of_a_sender_that_gives_no_id(
    door: Door, webhooks: list[DeliverWebhookRequest]
) -> None:
    for order in (7, 7, 8):
        await sent(door, order=order)
    first, again, other = (webhook.request_id for webhook in webhooks)
    assert first == again != other


async def test_what_proxies_add_is_joined_in_its_order_and_handed_on(
    door: Door, webhooks: list[DeliverWebhookRequest]
) -> None:
    added = [
        ("X-Forwarded-For", "192.0.2.1"),
        ("Via", "1.1 one"),
        ("x-forwarded-for", "192.0.2.2, 192.0.2.3"),
        ("Accept", "*/*"),
        ("VIA", "1.1 two"),
        ("accept", "text/html"),
        ("Cookie", "a=1"),
        ("Cookie", "b=2"),
    ]
    assert b" 200 " in (await sent(door, *added)).splitlines()[0]
    (webhook,) = webhooks
    assert webhook.body == b'{"order": 7}'
    assert dict(webhook.headers) == {
        **{name.lower(): value for name, value in GIVEN.items()},
        "x-forwarded-for": "192.0.2.1, 192.0.2.2, 192.0.2.3",
        "via": "1.1 one, 1.1 two",
        "accept": "*/*, text/html",
        "cookie": "a=1; b=2",
        "connection": "close",
    }


@pytest.mark.parametrize(
    "name", ["Authorization", "Content-Type", "Webhook-Id", "Webhook-Signature", "webhook-timestamp"]
)
@pytest.mark.parametrize("value", ["another", "the same"])
async def test_a_header_by_which_a_webhook_is_judged_or_read_comes_once(
    door: Door, webhooks: list[DeliverWebhookRequest], name: str, value: str
) -> None:
    answer = await sent(door, (name, GIVEN[name.title()] if value == "the same" else value))
    assert b" 400 " in answer.splitlines()[0]
    assert f"The header {name.lower()} came twice.".encode() in answer
    assert webhooks == []


async def test_behind_a_request_that_says_its_length_twice_no_other_one_is_read(door: Door) -> None:
    """Something in front of the gateway may have taken what follows for its body."""
    inner = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(inner) + 5}\r\n"
    async with served(door.app) as server, asyncio.timeout(60):
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner)
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("name", "value"), [("Host", "localhost"), ("Content-Length", "3"), ("Transfer-Encoding", "chunked")]
)
async def test_what_frames_a_request_comes_once(
    door: Door, webhooks: list[DeliverWebhookRequest], name: str, value: str
) -> None:
    assert b" 400 " in (await sent(door, (name, value))).splitlines()[0]
    assert webhooks == []
