"""A request that a tool sends into the world, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from pawl.chassis.ids import StoreId

REDIRECTS_MAX: Final = 5


class RequestFailed(Exception):
    """No response came, or none that can be read. The text is fit for the model."""

    def __init__(self, message: str, *, was_sent: bool, lookup: asyncio.Future[Sequence[str]] | None = None) -> None:
        super().__init__(message)
        self.was_sent = was_sent
        """True if the server may have had the request: then nobody knows what it did."""
        self.lookup = lookup
        """The look-up of a name, if it may go on: its thread cannot be stopped."""


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
    """Bytes of the body, as sent and as unpacked; with 0 nothing of it is waited for."""


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
    retry_after: str = ""
    """The header as it is; empty without one."""


class Egress(Protocol):
    """The way out into the world: what fetches anything on behalf of a store does it here."""

    def check(self, store_id: StoreId, url: str, *, with_secrets: bool = False) -> None:
        """Return if the rules allow a URL, as far as can be said without asking for its addresses.

        Secrets may go there over https, or where the deployment has opened the host.

        Raises:
            EgressRefused: they do not.
        """

    async def send(self, store_id: StoreId, request: OutboundRequest) -> OutboundResponse:
        """Send a request, follow its redirects, and return the response, whatever its status.

        Each hop is judged by its host and by all addresses that this has, and the
        connection goes to one of those. Safe to cancel.

        Raises:
            EgressRefused: the request, or one that a redirect asked for, must not be sent.
            RequestFailed: no response came, or none that can be read.
        """
