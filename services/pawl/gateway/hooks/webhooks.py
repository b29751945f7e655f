"""Deliveries from outside without a credential: webhooks for triggers of a store, and ends of its calls."""

from __future__ import annotations

import hashlib
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from pawl.agent.v1.trigger_pb2 import DeliverWebhookRequest
from pawl.chassis.ids import is_id
from pawl.chassis.strict_json import dumps_canonical, loads
from pawl.errors import CompletionNotFound, InvalidField, TriggerNotFound, Unavailable, by_reason
from pawl.gateway.services import COMPLETE_CALL, DELIVER_WEBHOOK, CallsOfStore, write
from pawl.gateway.web.answers import answer, read_body
from pawl.gateway.web.hosts import http_status, joined
from pawl.tool.v1.completion_pb2 import CompleteCallRequest

BODY_BYTES_MAX: Final = 256 * 1024


async def deliver(calls_of_store: CallsOfStore, request: Request) -> Response:
    """Answer `POST /hooks/{store_id}/{trigger_id}` with the fire: 200 once it is durable."""
    trigger_id = request.path_params["trigger_id"]
    call = calls_of_store(request.path_params["store_id"], TriggerNotFound)
    if not is_id(trigger_id):
        raise TriggerNotFound
    headers = joined(request.headers.items())
    body = await read_body(request, BODY_BYTES_MAX)
    # Of a sender that gives no id, the same body is the same event.
    request_id = f"hook_{hashlib.sha256(trigger_id.encode() + body).hexdigest()[:40]}"
    event = DeliverWebhookRequest(trigger_id=trigger_id, headers=headers, body=body, request_id=request_id)
    delivered = write(await call(DELIVER_WEBHOOK, event))
    return answer(delivered, status=_status(delivered.get("fire", {})))


async def complete(calls_of_store: CallsOfStore, request: Request) -> Response:
    """Answer `POST /completions/{store_id}/{token}`: 200 once the call has the end in the body, for good."""
    message = CompleteCallRequest(token=request.path_params["token"])
    call = calls_of_store(request.path_params["store_id"], CompletionNotFound)
    said = loads(await read_body(request, BODY_BYTES_MAX), bytes_max=BODY_BYTES_MAX)
    match said:
        case {"result": result, **more} if not more:
            message.result_json = dumps_canonical(result)
        case {"error": str(error), **more} if not more:
            message.error = error
        case _:
            raise InvalidField('The body must be {"result": ...} or {"error": "..."}.', field="body")
    return answer(write(await call(COMPLETE_CALL, message)))


def _status(fire: dict[str, str]) -> int:
    """Return the status by which the sender learns whether to deliver the event again."""
    if fire.get("outcome") != "SCHEDULE_FIRE_OUTCOME_REFUSED":
        return 200
    return http_status(by_reason.get(fire.get("reason", "").partition(":")[0], Unavailable)())
