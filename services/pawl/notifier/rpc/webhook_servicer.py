"""WebhookService."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime, timedelta
from typing import Final

from pawl.chassis.auth import require_user
from pawl.chassis.ids import check_id
from pawl.chassis.rpc_kinds import Context
from pawl.chassis.translate import Translator, Unknown
from pawl.errors import InvalidField, InvalidPageToken
from pawl.notifier.app.ports import WebhookRepository
from pawl.notifier.app.webhooks import Webhooks
from pawl.notifier.domain.notification import Inbox
from pawl.notifier.domain.webhook import DeliveryId, Webhook, WebhookDelivery, WebhookId
from pawl.notifier.rpc.convert import page_size
from pawl.notify.v1 import webhook_pb2 as pb
from pawl.notify.v1 import webhook_pb2_grpc


def _refused(unknown: Unknown) -> InvalidField:
    return InvalidField(f"{unknown.field}: {unknown.value} is not known", field=unknown.field)


_WIRE: Final = Translator(_refused)
_WEBHOOK: Final = _WIRE.struct(Webhook, pb.Webhook, field="webhook")
_DELIVERY: Final = _WIRE.struct(WebhookDelivery, pb.WebhookDelivery)
_TOKEN: Final = re.compile(r"deliveries-([0-9]{1,16})-([A-Za-z0-9_-]{1,64})")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class WebhookServicer(webhook_pb2_grpc.WebhookServiceServicer):
    """Serves a user's own webhooks; the credential says whose."""

    def __init__(self, webhooks: Webhooks, repository: WebhookRepository) -> None:
        self._webhooks = webhooks
        self._repository = repository

    async def CreateWebhook(self, request: pb.CreateWebhookRequest, context: Context) -> pb.CreateWebhookResponse:
        request_id = check_id(request.request_id, "request_id", optional=True)
        webhook, secret = await self._webhooks.create(_caller(), _WEBHOOK.read(request.webhook), request_id)
        return pb.CreateWebhookResponse(webhook=_WEBHOOK.fields(webhook), secret=_text(secret))

    async def GetWebhook(self, request: pb.GetWebhookRequest, context: Context) -> pb.GetWebhookResponse:
        webhook = await self._repository.webhook(_caller(), _id(request.webhook_id))
        return pb.GetWebhookResponse(webhook=_WEBHOOK.fields(webhook))

    async def ListWebhooks(self, request: pb.ListWebhooksRequest, context: Context) -> pb.ListWebhooksResponse:
        return pb.ListWebhooksResponse(webhooks=map(_WEBHOOK.fields, await self._repository.webhooks(_caller())))

    async def UpdateWebhook(self, request: pb.UpdateWebhookRequest, context: Context) -> pb.UpdateWebhookResponse:
        _id(request.webhook.webhook_id)
        webhook = await self._webhooks.update(_caller(), _WEBHOOK.read(request.webhook))
        return pb.UpdateWebhookResponse(webhook=_WEBHOOK.fields(webhook))

    async def DeleteWebhook(self, request: pb.DeleteWebhookRequest, context: Context) -> pb.DeleteWebhookResponse:
        await self._repository.delete(_caller(), _id(request.webhook_id))
        return pb.DeleteWebhookResponse()

    async def RotateWebhookSecret(
        self, request: pb.RotateWebhookSecretRequest, context: Context
    ) -> pb.RotateWebhookSecretResponse:
        secret = await self._webhooks.rotate(_caller(), _id(request.webhook_id))
        return pb.RotateWebhookSecretResponse(secret=_text(secret))

    async def TestWebhook(self, request: pb.TestWebhookRequest, context: Context) -> pb.TestWebhookResponse:
        test = await self._webhooks.test(_caller(), _id(request.webhook_id))
        return pb.TestWebhookResponse(delivery=_DELIVERY.fields(test))

    async def ListDeliveries(self, request: pb.ListDeliveriesRequest, context: Context) -> pb.ListDeliveriesResponse:
        size, before = page_size(request.page_size), _place(request.page_token)
        found = await self._repository.deliveries(_caller(), _id(request.webhook_id), before, limit=size + 1)
        page = found[:size]
        token = _token(page[-1]) if len(found) > size else ""
        return pb.ListDeliveriesResponse(deliveries=map(_DELIVERY.fields, page), next_page_token=token)

    async def ResendDelivery(self, request: pb.ResendDeliveryRequest, context: Context) -> pb.ResendDeliveryResponse:
        delivery_id = DeliveryId(check_id(request.delivery_id, "delivery_id"))
        delivery = await self._webhooks.resend(_caller(), delivery_id)
        return pb.ResendDeliveryResponse(delivery=_DELIVERY.fields(delivery))


def _caller() -> Inbox:
    caller = require_user()
    return Inbox(store_id=caller.store_id, user_id=caller.user_id)


def _id(webhook_id: str) -> WebhookId:
    return WebhookId(check_id(webhook_id, "webhook_id"))


def _text(secret: bytes) -> str:
    return f"whsec_{base64.b64encode(secret).decode()}" if secret else ""


def _token(last: WebhookDelivery) -> str:
    return f"deliveries-{(last.create_time - _EPOCH) // timedelta(microseconds=1)}-{last.delivery_id}"


def _place(token: str) -> tuple[datetime, str] | None:
    """Return the time and id of the last delivery of the page before; None for the first page."""
    if not token:
        return None
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise InvalidPageToken
    return _EPOCH + timedelta(microseconds=int(match[1])), match[2]
