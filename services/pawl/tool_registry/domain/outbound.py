"""A request that a tool sends into the world, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

REDIRECTS_MAX: Final = 5


class RequestFailed(Exception):
    """No response came, or none that can be read. The text is fit for the model."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent
        """True if the server may have had the request: then nobody knows what it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundRequest:
    """A request. Redirects are followed for GET and HEAD only: nothing else is sent twice."""

    url: str
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    """Another origin gets none of them but Accept and Accept-Language."""
    body: bytes | None = None
    timeout_seconds: float = 20.0
    """For all of it: names, redirects and the body."""
    bytes_max: int = 1024 * 1024
    """Bytes of the body, as sent and as unpacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundResponse:
    """A response, whatever its status."""

    status: int
    url: str
    """The URL that it came from, after redirects."""
    content_type: str
    """The header as it is; empty without one."""
    body: bytes
    is_cut: bool
    """True if the body was longer than asked for."""
