"""Webhooks from outside, as they come in, for the triggers of a store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from pawl.chassis.ids import is_id
from pawl.errors import InvalidField, TriggerNotFound
from pawl.gateway.adapters.services import DELIVER_WEBHOOK, Metadata, Services, webhook, write
from pawl.gateway.http.answers import answer, read_body

BODY_BYTES_MAX: Final = 256 * 1024
_DEADLINE_SECONDS: Final = 10.0


class Hooks:
    """Brings webhooks to the triggers that they are for, which judge them. Each store has a key for that."""

    def __init__(self, services: Services, key_of: Callable[[str], Metadata | None]) -> None:
        self._services = services
        self._key_of = key_of

    async def deliver(self, request: Request) -> Response:
        """Answer `POST /hooks/{store_id}/{trigger_id}`: 200 with the fire once it is durable."""
        store_id, trigger_id = request.path_params["store_id"], request.path_params["trigger_id"]
        metadata = self._key_of(store_id) if is_id(store_id) else None
        if metadata is None or not is_id(trigger_id):
            raise TriggerNotFound
        headers: dict[str, str] = {}
        for name, value in request.headers.items():
            if name in headers:
                raise InvalidField(f"The header {name[:64]} came twice.", field="headers")
            headers[name] = value
        body = await read_body(request, BODY_BYTES_MAX)
        # Of a sender that gives no id, the same body is the same event.
        request_id = f"hook_{hashlib.sha256(trigger_id.encode() + body).hexdigest()[:40]}"
        message = webhook(trigger_id, headers, body, request_id)
        fire = await self._services.call(DELIVER_WEBHOOK, message, metadata, timeout_seconds=_DEADLINE_SECONDS)
        return answer(write(fire))
