"""Webhooks of a user: made, changed, looked at by nobody else (NOTE-1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.chassis.database import Database
from pawl.notify.v1 import notify_pb2
from pawl.notify.v1 import webhook_pb2 as pb
from tests.rpc.notifier.test_inbox import ANN, ANN_ELSEWHERE, BOB, reason_of
from tests.web_server import WebServer

if TYPE_CHECKING:
    from pawl.notify.v1.webhook_pb2_grpc import WebhookServiceAsyncStub

URL = "https://example.com/hook"


async def created(
    webhooks: WebhookServiceAsyncStub, url: str = URL, *, request_id: str = "", **fields: object
) -> pb.CreateWebhookResponse:
    webhook = pb.Webhook(url=url, **fields)  # type: ignore[arg-type]
    return await webhooks.CreateWebhook(pb.CreateWebhookRequest(webhook=webhook, request_id=request_id), metadata=ANN)


async def test_a_webhook_is_made_changed_and_deleted(webhooks: WebhookServiceAsyncStub) -> None:
    made = await created(webhooks, name="pager", kinds=[notify_pb2.NOTIFICATION_KIND_RUN_FAILED])
    webhook = made.webhook
    assert made.secret.startswith("whsec_")
    assert webhook.enabled
    found = await webhooks.GetWebhook(pb.GetWebhookRequest(webhook_id=webhook.webhook_id), metadata=ANN)
    assert found.webhook == webhook
    webhook.name, webhook.enabled = "mail", False
    del webhook.kinds[:]
    changed = await webhooks.UpdateWebhook(pb.UpdateWebhookRequest(webhook=webhook), metadata=ANN)
    assert changed.webhook == webhook
    listed = await webhooks.ListWebhooks(pb.ListWebhooksRequest(), metadata=ANN)
    assert list(listed.webhooks) == [webhook]
    await webhooks.DeleteWebhook(pb.DeleteWebhookRequest(webhook_id=webhook.webhook_id), metadata=ANN)
    assert not (await webhooks.ListWebhooks(pb.ListWebhooksRequest(), metadata=ANN)).webhooks


async def test_a_request_makes_one_webhook_and_tells_its_secret_once(webhooks: WebhookServiceAsyncStub) -> None:
    first = await created(webhooks, request_id="r1")
    again = await created(webhooks, request_id="r1")
    assert (again.webhook, again.secret) == (first.webhook, "")
    assert await reason_of(created(webhooks, "https://example.com/else", request_id="r1")) == "REQUEST_ID_REUSED"


async def test_a_time_that_is_none_is_refused(webhooks: WebhookServiceAsyncStub) -> None:
    webhook = pb.Webhook(url="https://example.com/", create_time=Timestamp(seconds=2**62))
    making = webhooks.CreateWebhook(pb.CreateWebhookRequest(webhook=webhook), metadata=ANN)
    assert await reason_of(making) == "INVALID_FIELD"


async def test_a_user_has_ten_at_most(webhooks: WebhookServiceAsyncStub) -> None:
    for _ in range(10):
        await created(webhooks)
    assert await reason_of(created(webhooks)) == "INVALID_FIELD"


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",  # The secret of a body is its reader's.
        "https://169.254.169.254/",
        "https://10.1.2.3/",
        "https://elsewhere.example/",
        "ftp://example.com/",
        "",
    ],
)
async def test_urls_that_the_deployment_does_not_allow_are_refused(webhooks: WebhookServiceAsyncStub, url: str) -> None:
    assert await reason_of(created(webhooks, url)) == "INVALID_FIELD"
    webhook = (await created(webhooks)).webhook
    webhook.url = url
    change = webhooks.UpdateWebhook(pb.UpdateWebhookRequest(webhook=webhook), metadata=ANN)
    assert await reason_of(change) == "INVALID_FIELD"


async def test_who_may_no_longer_reach_a_url_can_disable_its_webhook(
    webhooks: WebhookServiceAsyncStub, database: Database
) -> None:
    webhook = (await created(webhooks)).webhook
    webhook.url = "https://elsewhere.example/"
    await database.execute("UPDATE notifier.webhooks SET url = $1", webhook.url)
    change = pb.UpdateWebhookRequest(webhook=webhook)
    assert await reason_of(webhooks.UpdateWebhook(change, metadata=ANN)) == "INVALID_FIELD"
    change.webhook.enabled = False
    assert not (await webhooks.UpdateWebhook(change, metadata=ANN)).webhook.enabled


async def test_a_refusal_of_http_says_what_to_use(webhooks: WebhookServiceAsyncStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="use https"):
        await created(webhooks, "http://example.com/")


async def test_http_goes_where_the_deployment_has_opened_it(
    webhooks: WebhookServiceAsyncStub, receiver: WebServer
) -> None:
    assert (await created(webhooks, f"http://127.0.0.1:{receiver.port}/")).webhook.enabled


@pytest.mark.parametrize("metadata", [BOB, ANN_ELSEWHERE], ids=["another user", "another store"])
async def test_a_webhook_of_another_one_is_not_there(
    webhooks: WebhookServiceAsyncStub, receiver: WebServer, metadata: tuple[tuple[str, str], ...]
) -> None:
    webhook = (await created(webhooks, f"http://127.0.0.1:{receiver.port}/")).webhook
    test = await webhooks.TestWebhook(pb.TestWebhookRequest(webhook_id=webhook.webhook_id), metadata=ANN)
    webhook_id = webhook.webhook_id
    assert not (await webhooks.ListWebhooks(pb.ListWebhooksRequest(), metadata=metadata)).webhooks
    for call in (
        webhooks.GetWebhook(pb.GetWebhookRequest(webhook_id=webhook_id), metadata=metadata),
        webhooks.UpdateWebhook(pb.UpdateWebhookRequest(webhook=webhook), metadata=metadata),
        webhooks.DeleteWebhook(pb.DeleteWebhookRequest(webhook_id=webhook_id), metadata=metadata),
        webhooks.RotateWebhookSecret(pb.RotateWebhookSecretRequest(webhook_id=webhook_id), metadata=metadata),
        webhooks.TestWebhook(pb.TestWebhookRequest(webhook_id=webhook_id), metadata=metadata),
        webhooks.ListDeliveries(pb.ListDeliveriesRequest(webhook_id=webhook_id), metadata=metadata),
    ):
        assert await reason_of(call) == "WEBHOOK_NOT_FOUND"
    resend = pb.ResendDeliveryRequest(delivery_id=test.delivery.delivery_id)
    assert await reason_of(webhooks.ResendDelivery(resend, metadata=metadata)) == "DELIVERY_NOT_FOUND"


async def test_a_kind_that_is_not_known_is_refused(webhooks: WebhookServiceAsyncStub) -> None:
    for kind in (0, 99):
        assert await reason_of(created(webhooks, kinds=[kind])) == "INVALID_FIELD"
