"""Requests without a credential: webhooks for triggers, call completions, and unsubscribe links."""

from __future__ import annotations

import hashlib
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from pawl.agent.v1.trigger_pb2 import DeliverWebhookRequest
from pawl.agent.v1.workflow_pb2 import SendEventRequest
from pawl.chassis.ids import is_id
from pawl.chassis.strict_json import dumps_canonical, loads
from pawl.errors import (
    ChannelNotFound,
    CompletionNotFound,
    InvalidField,
    PawlError,
    TriggerNotFound,
    Unavailable,
    by_reason,
)
from pawl.gateway.services import COMPLETE_CALL, DELIVER_WEBHOOK, SEND_EVENT, UNSUBSCRIBE, CallsOfStore, write
from pawl.gateway.web import hosts
from pawl.gateway.web.answers import answer, read_body
from pawl.gateway.web.hosts import http_status, joined
from pawl.notify.v1 import channel_pb2
from pawl.tool.v1.completion_pb2 import CompleteCallRequest

BODY_BYTES_MAX: Final = 256 * 1024


async def deliver(calls_of_store: CallsOfStore, request: Request) -> Response:
    """Handle `POST /hooks/{store_id}/{trigger_id}`: respond with the firing, which is durable if the status is 200."""
    trigger_id = request.path_params["trigger_id"]
    call = calls_of_store(request.path_params["store_id"], TriggerNotFound)
    if not is_id(trigger_id):
        raise TriggerNotFound
    headers = joined(request.headers.items())
    body = await read_body(request, BODY_BYTES_MAX)
    # If the sender does not send event ids, the same body counts as the same event.
    request_id = f"hook_{hashlib.sha256(trigger_id.encode() + body).hexdigest()[:40]}"
    event = DeliverWebhookRequest(trigger_id=trigger_id, headers=headers, body=body, request_id=request_id)
    delivered = write(await call(DELIVER_WEBHOOK, event))
    return answer(delivered, status=_status(delivered.get("fire", {})))


async def complete(calls_of_store: CallsOfStore, request: Request) -> Response:
    """Handle `POST /completions/{store_id}/{token}`: respond with 200 once the outcome in the body is durable.

    The token belongs to a call or to a workflow's wait. Only tokens of waits contain dots.
    """
    message = CompleteCallRequest(token=request.path_params["token"])
    call = calls_of_store(request.path_params["store_id"], CompletionNotFound)
    body = loads(await read_body(request, BODY_BYTES_MAX), bytes_max=BODY_BYTES_MAX)
    is_of_wait = "." in message.token
    match body:
        case {"result": result, **more} if not more and is_of_wait:
            event = SendEventRequest(token=message.token, payload_json=dumps_canonical(result))
            return answer(write(await call(SEND_EVENT, event)))
        case {"result": result, **more} if not more:
            message.result_json = dumps_canonical(result)
        case {"error": str(error), **more} if not more and not is_of_wait:
            message.error = error
        case _:
            problem = 'The body must be {"result": ...}' + (", for a wait." if is_of_wait else ' or {"error": "..."}.')
            raise InvalidField(problem, field="body")
    return answer(write(await call(COMPLETE_CALL, message)))


def _status(fire: dict[str, str]) -> int:
    """Return the status that tells the sender whether to deliver the event again."""
    if fire.get("outcome") != "SCHEDULE_FIRE_OUTCOME_REFUSED":
        return 200
    return http_status(by_reason.get(fire.get("reason", "").partition(":")[0], Unavailable)())


_BODY_BYTES_MAX: Final = 4096
_TOKEN_CHARACTERS_MAX: Final = 256
_POLICY: Final = "default-src 'none'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Pawl</title></head>
<body>
<h1>{title}</h1>
<p>{text}</p>
{form}</body>
</html>
"""
_FORM: Final = """\
<form method="post">
<input type="hidden" name="List-Unsubscribe" value="One-Click">
<button>Unsubscribe</button>
</form>
"""


async def unsubscribe(calls_of_store: CallsOfStore, request: Request) -> Response:
    """Handle `POST /unsubscribe/{store_id}/{token}`: respond with 200 once the e-mails are disabled.

    A GET only shows a form, because mail scanners follow links.
    """
    if request.method != "POST":
        return _page("Unsubscribe?", "Pawl will send no more notifications to this e-mail address.", form=_FORM)
    token = request.path_params["token"]
    try:
        await read_body(request, _BODY_BYTES_MAX)
        call = calls_of_store(request.path_params["store_id"], ChannelNotFound)
        if len(token) > _TOKEN_CHARACTERS_MAX:
            raise ChannelNotFound
        await call(UNSUBSCRIBE, channel_pb2.UnsubscribeChannelRequest(token=token))
    except ChannelNotFound:
        return _page("Invalid link", "This link is unknown or has expired.", status=404)
    except PawlError as error:
        return _page("Something went wrong", "Please try again in a moment.", status=hosts.http_status(error))
    return _page("You are unsubscribed", "The owner of these notifications can turn them on again in Pawl.")


def _page(title: str, text: str, *, form: str = "", status: int = 200) -> Response:
    headers = {"Content-Security-Policy": _POLICY}
    return Response(_PAGE.format(title=title, text=text, form=form), status, headers, media_type="text/html")
