"""The links in e-mails that end them: a page that asks, and what its button does, or a mail program (RFC 8058)."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from pawl.errors import ChannelNotFound, PawlError
from pawl.gateway.services import UNSUBSCRIBE, CallsOfStore
from pawl.gateway.web import hosts as door
from pawl.gateway.web.answers import read_body
from pawl.notify.v1 import channel_pb2

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
    """Answer `POST /unsubscribe/{store_id}/{token}`: 200 once the e-mails are disabled.

    A GET gets a question: programs that scan mail follow its links.
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
        return _page("This link does nothing", "It is not known, or no longer good.", status=404)
    except PawlError as error:
        return _page("That did not work", "Please try it again in a moment.", status=door.http_status(error))
    return _page("You are unsubscribed", "Who made these notifications can turn them on again.")


def _page(title: str, text: str, *, form: str = "", status: int = 200) -> Response:
    headers = {"Content-Security-Policy": _POLICY}
    return Response(_PAGE.format(title=title, text=text, form=form), status, headers, media_type="text/html")
