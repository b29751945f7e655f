"""The console: files that were built ahead, from memory."""

from __future__ import annotations

import gzip
import hashlib
from importlib.resources import files
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pawl.errors import MethodNotFound
from pawl.gateway.web.answers import refusal

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
}
# Nothing but what came with the page runs, and no request leaves its origin.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script';"
    " trusted-types 'none'"
)
_INDEX: Final = "index.html"
NOTHING: Final = MethodNotFound("There is nothing here.")


class _File(msgspec.Struct, frozen=True):
    body: bytes
    packed: bytes
    content_type: str
    tag: str


class Pages:
    """Answers with the files of the console; every other address of a page is its first page, which knows the way."""

    def __init__(self) -> None:
        self._files = {
            each.name: _read(each.name, each.read_bytes()) for each in (files("pawl.gateway") / "static").iterdir()
        }

    def page(self, request: Request) -> Response:
        """Answer `GET` for a file, or for a page of the console."""
        found = self._files.get(request.scope["path"].removeprefix("/") or _INDEX)
        if found is None and "text/html" in request.headers.get("accept", ""):
            found = self._files.get(_INDEX)
        if found is None:
            return refusal(NOTHING)
        headers = {
            "ETag": found.tag,
            "Cache-Control": "no-cache",
            "Content-Security-Policy": _POLICY,
            "Vary": "Accept-Encoding",
            # Or browsers look up the hosts of links that nobody follows: a model may write what it knows into one.
            "X-DNS-Prefetch-Control": "off",
        }
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            return Response(found.packed, headers=headers, media_type=found.content_type)
        return Response(found.body, headers=headers, media_type=found.content_type)


def _read(name: str, body: bytes) -> _File:
    suffix = f".{name.rpartition('.')[2]}"
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return _File(body, gzip.compress(body, mtime=0), _TYPES.get(suffix, "application/octet-stream"), tag)
