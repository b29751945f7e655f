"""Bodies in and answers out, errors in the form of the Connect protocol."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # ships .pyi but no py.typed
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pawl.chassis.rpc.status import DOMAIN
from pawl.errors import Cancelled, DeadlineExceeded, InvalidJson, PawlError, TooLarge
from pawl.gateway.web import hosts as door

_BODY_SECONDS: Final = 10.0


def answer(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer in JSON."""
    return Response(msgspec.json.encode(content), status, headers, media_type=door.JSON)


def refusal(error: PawlError, *, status: int = 0, headers: Mapping[str, str] | None = None) -> Response:
    """Return the answer that an error is; `status` stands in for that of its kind."""
    if error.kind == "UNAUTHENTICATED":
        headers = {"WWW-Authenticate": "Bearer", **(headers or {})}
    return answer(told(error), status=status or door.http_status(error), headers=headers)


def told(error: PawlError) -> dict[str, Any]:
    """Return an error as Connect has it: its code, its message, and the reason on which programs branch."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=dict(error.metadata))
    detail = {
        "type": "google.rpc.ErrorInfo",
        "value": base64.b64encode(info.SerializeToString()).decode().rstrip("="),
        "debug": {"reason": error.reason, "domain": DOMAIN, "metadata": dict(error.metadata)},
    }
    return {"code": error.kind.lower(), "message": error.message, "details": [detail]}


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Return the body of a request.

    Raises:
        TooLarge: it has more than `bytes_max`.
        DeadlineExceeded: it does not arrive.
    """
    too_large = TooLarge(f"The body has more than {bytes_max} bytes.", limit=bytes_max)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) <= len(str(bytes_max)) and int(length) > bytes_max:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > bytes_max:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise DeadlineExceeded(f"The body did not arrive in {_BODY_SECONDS:g} s.") from None
    except ClientDisconnect:
        raise Cancelled from None
    return b"".join(parts)


async def read_json(request: Request, bytes_max: int) -> Any:
    """Return the body of a request, which is JSON and says so; an empty one is an empty object.

    Raises:
        InvalidField: it does not say so.
        InvalidJson: it is not.
        TooLarge, DeadlineExceeded: see `read_body`.
    """
    door.check_json(request.headers.get("content-type"))
    body = await read_body(request, bytes_max)
    try:
        return msgspec.json.decode(body) if body else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"The body is not JSON: {error}"[:500]) from None
