"""Deliveries as signed requests, by the Standard Webhooks specification."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from standardwebhooks.webhooks import Webhook as Signature

from pawl.chassis.egress.policy import EgressRefused
from pawl.chassis.egress.request import Egress, OutboundRequest, RequestFailed
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.retry import asked_seconds
from pawl.notifier.deliveries.rules import Attempt, DeliveryId, Outcome

TRY_SECONDS: Final = 15.0


class SignedPosts:
    """See `ports.ChannelSender`. Of an answer only the status is read, and Retry-After."""

    def __init__(self, egress: Egress, clock: Clock) -> None:
        self._egress = egress
        self._clock = clock
        self._lookups: dict[DeliveryId, asyncio.Future[Sequence[str]]] = {}

    async def send(self, attempt: Attempt) -> Outcome:
        store_id = attempt.candidate.inbox.store_id
        request = OutboundRequest(
            url=attempt.url,
            method="POST",
            headers=self._headers(attempt),
            body=attempt.body.encode(),
            timeout_seconds=TRY_SECONDS,
            bytes_max=0,
        )
        started = self._clock.monotonic()
        try:
            self._egress.check(store_id, attempt.url, with_secrets=True)
            response = await self._egress.send(store_id, request)
        except EgressRefused as refused:
            return Outcome(error=f"the deployment does not allow it: {refused}")
        except RequestFailed as failed:
            if failed.lookup is not None:
                self._lookups[attempt.candidate.delivery_id] = failed.lookup
            return Outcome(error=str(failed), latency_seconds=self._clock.monotonic() - started)
        return Outcome(
            status=response.status,
            latency_seconds=self._clock.monotonic() - started,
            retry_after_seconds=asked_seconds(response.retry_after, now=self._clock.now()),
        )

    async def rest(self, attempt: Attempt) -> None:
        lookup = self._lookups.pop(attempt.candidate.delivery_id, None)
        if lookup is not None:
            await asyncio.wait({lookup})

    def _headers(self, attempt: Attempt) -> dict[str, str]:
        now = datetime.fromtimestamp(int(self._clock.now()), UTC)
        message_id = attempt.candidate.delivery_id
        signatures = (Signature(secret).sign(message_id, now, attempt.body) for secret in attempt.secrets)
        return {
            "Content-Type": "application/json",
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(signatures),
        }
