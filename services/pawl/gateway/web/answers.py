"""Request bodies and responses. Errors use the Connect protocol."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

import msgspec
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # ships .pyi but no py.typed
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pawl.chassis.rpc.status import DOMAIN
from pawl.errors import Cancelled, DeadlineExceeded, InvalidJson, MethodNotFound, PawlError, TooLarge
from pawl.gateway.web import hosts

_BODY_SECONDS: Final = 10.0


def answer(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type=hosts.JSON)


def refusal(error: PawlError, *, status: int = 0, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response for an error. `status` overrides the default status of the error's kind."""
    if error.kind == "UNAUTHENTICATED":
        headers = {"WWW-Authenticate": "Bearer", **(headers or {})}
    return answer(error_json(error), status=status or hosts.http_status(error), headers=headers)


def error_json(error: PawlError) -> dict[str, Any]:
    """Return an error in Connect format: code, message, and the machine-readable reason."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=dict(error.metadata))
    detail = {
        "type": "google.rpc.ErrorInfo",
        "value": base64.b64encode(info.SerializeToString()).decode().rstrip("="),
        "debug": {"reason": error.reason, "domain": DOMAIN, "metadata": dict(error.metadata)},
    }
    return {"code": error.kind.lower(), "message": error.message, "details": [detail]}


async def read_body(request: Request, bytes_max: int) -> bytes:
    """Return a request's body.

    Raises:
        TooLarge: The body has more than `bytes_max` bytes.
        DeadlineExceeded: The body did not arrive in time.
        Cancelled: The client disconnected.
    """
    too_large = TooLarge(f"The body must be at most {bytes_max} bytes.", limit=bytes_max)
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
        raise DeadlineExceeded(f"The body did not arrive within {_BODY_SECONDS:g} s.") from None
    except ClientDisconnect:
        raise Cancelled from None
    return b"".join(parts)


async def read_json(request: Request, bytes_max: int) -> Any:
    """Parse a JSON body. An empty body counts as an empty object.

    Raises:
        InvalidField: The content type is not JSON.
        InvalidJson: The body is not JSON.
        TooLarge, DeadlineExceeded, Cancelled: See `read_body`.
    """
    hosts.check_json(request.headers.get("content-type"))
    body = await read_body(request, bytes_max)
    try:
        return msgspec.json.decode(body) if body else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(f"The body is not JSON: {error}"[:500]) from None


_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
}
# Only scripts from this origin run, and requests are only sent to this origin.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script';"
    " trusted-types 'none'"
)
_INDEX: Final = "index.html"
NOT_FOUND: Final = MethodNotFound("Not found.")


class _File(msgspec.Struct, frozen=True):
    body: bytes
    compressed: bytes
    content_type: str
    tag: str


class Pages:
    """Serves the console's files.

    For unknown paths, it serves the index page, which does the routing in the browser.
    """

    def __init__(self) -> None:
        self._files = {
            each.name: _read(each.name, each.read_bytes()) for each in (files("pawl.gateway") / "static").iterdir()
        }

    def page(self, request: Request) -> Response:
        """Handle `GET` requests for the console's files and pages."""
        found = self._files.get(request.scope["path"].removeprefix("/") or _INDEX)
        if found is None and "text/html" in request.headers.get("accept", ""):
            found = self._files.get(_INDEX)
        if found is None:
            return refusal(NOT_FOUND)
        headers = {
            "ETag": found.tag,
            "Cache-Control": "no-cache",
            "Content-Security-Policy": _POLICY,
            "Vary": "Accept-Encoding",
            # Browsers would resolve the hosts of links that no one clicks, and a model can hide data in a hostname.
            "X-DNS-Prefetch-Control": "off",
        }
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return Response(found.compressed, headers=headers, media_type=found.content_type)
        return Response(found.body, headers=headers, media_type=found.content_type)


def _read(name: str, body: bytes) -> _File:
    suffix = f".{name.rpartition('.')[2]}"
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return _File(body, gzip.compress(body, mtime=0), _TYPES.get(suffix, "application/octet-stream"), tag)
