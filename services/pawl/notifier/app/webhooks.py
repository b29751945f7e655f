"""A user's webhooks: made, changed and tested."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from pawl.chassis.clock import Clock
from pawl.chassis.egress_requests import Egress
from pawl.chassis.egress_rules import EgressRefused, read_target
from pawl.chassis.ids import IdSource
from pawl.errors import InvalidField
from pawl.notifier.app.ports import NewWebhook, WebhookRepository
from pawl.notifier.domain.notification import Inbox
from pawl.notifier.domain.webhook import (
    TEST,
    DeliveryId,
    DeliveryState,
    Webhook,
    WebhookDelivery,
    WebhookId,
    body_of_test,
    checked,
)

SECRET_BYTES: Final = 32


class Webhooks:
    """The use cases of webhooks; `on_due` is called where a delivery is to be sent now."""

    def __init__(
        self,
        repository: WebhookRepository,
        egress: Egress,
        clock: Clock,
        ids: IdSource,
        *,
        on_due: Callable[[], None],
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._repository = repository
        self._egress = egress
        self._clock = clock
        self._ids = ids
        self._on_due = on_due
        self._random_bytes = random_bytes

    async def create(self, inbox: Inbox, asked: Webhook, request_id: str) -> tuple[Webhook, bytes]:
        """Make a webhook, once for a request id; returns its secret too, which is empty if it was there.

        Raises:
            InvalidField: it has no meaning, its URL is not allowed, or the user has too many.
            RequestIdReused: the request made another webhook.
        """
        host = self._host(inbox, checked(asked))
        webhook = replace(
            asked, webhook_id=WebhookId(self._ids.new("hook")), enabled=True, disable_reason="", create_time=self._now()
        )
        secret = self._random_bytes(SECRET_BYTES)
        said = repr((asked.name, asked.url, [kind.value for kind in asked.kinds]))
        new = NewWebhook(
            inbox=inbox,
            webhook=webhook,
            host=host,
            secret=secret,
            request_id=request_id,
            request_hash=hashlib.sha256(said.encode()).digest(),
        )
        kept = await self._repository.create(new)
        return kept, secret if kept.webhook_id == webhook.webhook_id else b""

    async def update(self, inbox: Inbox, asked: Webhook) -> Webhook:
        """Replace what a user says of a webhook.

        Raises:
            WebhookNotFound: the user has none of that id.
            InvalidField: it has no meaning, or its URL is not allowed; that of one that is not enabled may stay.
        """
        before = await self._repository.webhook(inbox, checked(asked).webhook_id)
        stays = asked.url == before.url and not asked.enabled
        host = read_target(asked.url).host if stays else self._host(inbox, asked)
        return await self._repository.update(inbox, asked, host=host)

    async def rotate(self, inbox: Inbox, webhook_id: WebhookId) -> bytes:
        """Give a webhook another secret, and return it.

        Raises:
            WebhookNotFound: the user has none of that id.
        """
        secret = self._random_bytes(SECRET_BYTES)
        await self._repository.rotate(inbox, webhook_id, secret)
        return secret

    async def test(self, inbox: Inbox, webhook_id: WebhookId) -> WebhookDelivery:
        """Have a test sent; returns it, or the one that waits.

        Raises:
            WebhookNotFound: the user has none of that id.
        """
        test = WebhookDelivery(
            delivery_id=DeliveryId(self._ids.new("dlv")),
            webhook_id=webhook_id,
            type=TEST,
            number=0,
            state=DeliveryState.WAITING,
            tries=0,
            create_time=self._now(),
        )
        kept = await self._repository.add_test(inbox, test, body_of_test(inbox, webhook_id, test.create_time))
        self._on_due()
        return kept

    async def resend(self, inbox: Inbox, delivery_id: DeliveryId) -> WebhookDelivery:
        """Send a delivery once more.

        Raises:
            DeliveryNotFound: the user has none of that id.
        """
        kept = await self._repository.resend(inbox, delivery_id)
        self._on_due()
        return kept

    def _host(self, inbox: Inbox, webhook: Webhook) -> str:
        try:
            self._egress.check(inbox.store_id, webhook.url, with_secrets=True)
            return read_target(webhook.url).host
        except EgressRefused as refused:
            advice = "; use https" if webhook.url.lower().startswith("http:") else ""
            raise InvalidField(f"url: {refused}{advice}", field="webhook.url") from None

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.now(), UTC)
