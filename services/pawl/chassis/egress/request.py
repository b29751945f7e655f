"""Unpacking what servers send packed, no further than it is wanted."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from pawl.chassis.ids import StoreId

_GZIP: Final = 16 + zlib.MAX_WBITS


class CodingError(Exception):
    """A body that is not packed as its header says, or in a way that was not asked for."""


class Unpacker:
    """Unpacks a body while it comes in, and stops as soon as it is longer than wanted.

    Of a small body that unpacks to a huge one, no more than `bytes_max` + 1 bytes
    are ever made.

    Raises:
        CodingError: the coding is not gzip, or the body is broken.
    """

    def __init__(self, coding: str, *, bytes_max: int) -> None:
        self.body = bytearray()
        self._bytes_max = bytes_max
        coding = coding.strip().lower()
        self._is_packed = coding in ("gzip", "x-gzip")
        if not self._is_packed and coding not in ("", "identity"):
            raise CodingError("the body is packed in a way that was not asked for")
        self._inflate: zlib._Decompress | None = None

    @property
    def is_full(self) -> bool:
        """True if the body is longer than wanted."""
        return len(self.body) > self._bytes_max

    def feed(self, part: bytes) -> None:
        """Unpack the next part."""
        if not self._is_packed:
            self.body += part[: self._bytes_max + 1 - len(self.body)]
            return
        while part and not self.is_full:
            if self._inflate is None:
                self._inflate = zlib.decompressobj(_GZIP)
            try:
                self.body += self._inflate.decompress(part, self._bytes_max + 1 - len(self.body))
            except zlib.error:
                raise CodingError("the packed body is broken") from None
            if self._inflate.eof:
                # RFC 1952, 2.2: a gzip file is any number of members, one after the other. Some are padded with NULs.
                part, self._inflate = self._inflate.unused_data.lstrip(b"\0"), None
            else:
                part = self._inflate.unconsumed_tail

    def end(self) -> None:
        """Say that nothing more comes."""
        if self._inflate is not None:
            raise CodingError("the packed body ends in the middle")


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
