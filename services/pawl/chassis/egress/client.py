"""Requests into the world: judged, limited in time and bytes, with redirects that are judged each."""

from __future__ import annotations

import asyncio
import math
import ssl
import zlib
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urljoin

import httpx2
import msgspec

from pawl.chassis.egress.addresses import Address, Lookups
from pawl.chassis.egress.policy import EgressRefused, EgressRules, Target, read_rules, read_target, rules_of
from pawl.chassis.egress.transport import GuardedTransport
from pawl.chassis.ids import StoreId
from pawl.chassis.process import logs
from pawl.chassis.process.start import StartError

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


USER_AGENT: Final = "Pawl/0.1"

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_FOLLOWED: Final = frozenset({"GET", "HEAD"})
_FOR_ANY_ORIGIN: Final = frozenset({"accept", "accept-language"})

_LOG_SECONDS: Final = 60.0
# Refusals of which the log has the time: each is a warning once a minute.
_LOGGED_MAX: Final = 1000

_log = logs.get_logger(__name__)


class GuardedEgress:
    """The Egress port. Without an entry for a store or `*` in `rules`, the public internet may be reached.

    Cookies are neither kept nor sent, and proxies of the environment are not used.
    """

    def __init__(
        self,
        rules: Mapping[str, EgressRules],
        *,
        lookups: Lookups | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._rules = rules
        self._lookups = lookups or Lookups()
        self._tls = tls or httpx2.create_ssl_context()
        self._logged_at: dict[tuple[StoreId, str], float] = {}

    def transport(self, store_id: StoreId, *, with_secrets: bool = False) -> GuardedTransport:
        """Return a transport for clients that make their own requests on behalf of a store.

        One `with_secrets` goes over https, or to what the deployment has opened by its name.
        """
        rules = rules_of(self._rules, store_id)
        begin_lookup = partial(self._lookups.begin, store_id)
        return GuardedTransport(rules, begin_lookup=begin_lookup, tls=self._tls, with_secrets=with_secrets)

    def check(self, store_id: StoreId, url: str, *, with_secrets: bool = False) -> None:
        rules, target = rules_of(self._rules, store_id), read_target(url)
        rules.check_target(target)
        if with_secrets:
            rules.check_secrets(target)

    async def locate(self, store_id: StoreId, url: str) -> tuple[Target, Sequence[Address]]:
        """Return the target of a URL and its addresses, for what speaks no HTTP and sends a password there.

        Raises:
            EgressRefused: the deployment does not name it, it must not be reached, or no secret sent to it.
        """
        target = read_target(url)
        rules_of(self._rules, store_id).check_named(target)
        return target, await self.transport(store_id, with_secrets=True).addresses(target)

    async def send(self, store_id: StoreId, request: OutboundRequest) -> OutboundResponse:
        sent, transport = _Sent(), self.transport(store_id)
        try:
            async with asyncio.timeout(request.timeout_seconds):
                return await self._follow(transport, request, sent)
        except EgressRefused as refused:
            now, key = asyncio.get_running_loop().time(), (store_id, str(refused))
            is_news = now - self._logged_at.get(key, -math.inf) >= _LOG_SECONDS
            if is_news:
                if len(self._logged_at) >= _LOGGED_MAX:
                    self._logged_at.clear()
                self._logged_at[key] = now
            (_log.warning if is_news else _log.debug)("egress.refused", store=store_id, reason=str(refused))
            raise
        except TimeoutError:
            message = f"no response of {sent.authority} within {request.timeout_seconds:g} s"
            raise RequestFailed(message, was_sent=sent.is_sent, lookup=transport.lookup) from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            raise RequestFailed(f"{sent.authority} cannot be connected to", was_sent=False) from None
        except httpx2.LocalProtocolError:
            raise RequestFailed("the request cannot be written down", was_sent=False) from None
        except (httpx2.HTTPError, CodingError):
            # Their texts may quote what was sent, and so a secret.
            raise RequestFailed(f"{sent.authority} did not answer as it should", was_sent=sent.is_sent) from None

    async def _follow(self, transport: GuardedTransport, request: OutboundRequest, sent: _Sent) -> OutboundResponse:
        target = read_target(request.url)
        headers = dict(request.headers)
        redirects = 0
        while True:
            sent.authority = target.authority
            response = await transport.handle_async_request(_as_sent(request, target, headers, sent))
            try:
                location = response.headers.get("location")
                if response.status_code not in _REDIRECTS or request.method not in _FOLLOWED or not location:
                    return await _read(request, target, response)
            finally:
                await response.aclose()
            redirects += 1
            if redirects > REDIRECTS_MAX:
                raise RequestFailed(f"more than {REDIRECTS_MAX} redirects, the last to {location[:200]}", was_sent=True)
            following = _join(target, location)
            if following.origin != target.origin:
                # For good: an origin that a redirect leads back to was not asked by the caller.
                headers = {name: value for name, value in headers.items() if name.lower() in _FOR_ANY_ORIGIN}
            target = following


class _Sent:
    """The progress of a request: the host that it is for, and whether it went out."""

    def __init__(self) -> None:
        self.authority = "the host"
        self.is_sent = False

    async def trace(self, event: str, _: object) -> None:
        """Note that the request goes out; httpcore says so."""
        self.is_sent = self.is_sent or event.endswith("send_request_headers.started")


def _join(target: Target, location: str) -> Target:
    try:
        return read_target(urljoin(target.url, location))
    except ValueError:
        raise EgressRefused("a redirect to what is not a URL") from None


def _as_sent(request: OutboundRequest, target: Target, headers: Mapping[str, str], sent: _Sent) -> httpx2.Request:
    built = httpx2.Headers({"User-Agent": USER_AGENT, "Accept": "*/*"})
    built.update(dict(headers))
    built["Accept-Encoding"] = "gzip"
    timeouts = dict.fromkeys(("connect", "read", "write", "pool"), request.timeout_seconds)
    return httpx2.Request(
        request.method,
        target.url,
        headers=built,
        content=request.body,
        extensions={"timeout": timeouts, "trace": sent.trace},
    )


async def _read(request: OutboundRequest, target: Target, response: httpx2.Response) -> OutboundResponse:
    """Read the body as far as it is wanted, unpacking as it comes."""
    answered = OutboundResponse(
        status=response.status_code,
        url=target.url,
        content_type=response.headers.get("content-type", ""),
        body=b"",
        is_cut=False,
        retry_after=response.headers.get("retry-after", ""),
    )
    if request.bytes_max == 0:
        return answered
    unpacker = Unpacker(response.headers.get("content-encoding", ""), bytes_max=request.bytes_max)
    received = 0
    async with aclosing(response.aiter_raw()) as parts:
        async for part in parts:
            received += len(part)
            unpacker.feed(part)
            if unpacker.is_full or received > request.bytes_max:
                break
        else:
            unpacker.end()
    is_cut = unpacker.is_full or received > request.bytes_max
    return replace(answered, body=bytes(unpacker.body[: request.bytes_max]), is_cut=is_cut)


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    hosts: list[str] | None = None
    private: list[str] = msgspec.field(default_factory=list)


def read_egress_file(path: Path | None) -> dict[str, EgressRules]:
    """Return the rules of each store, `*` for all that have none of their own; none without a file.

    Raises:
        StartError: the file cannot be read, or has an entry that cannot be used.
    """
    if path is None:
        return {}
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=dict[str, _Entry])
        return {store: read_rules(entry.hosts, entry.private) for store, entry in entries.items()}
    except OSError as error:
        raise StartError(f"PAWL_EGRESS_FILE: cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        form = '{"*": {"hosts": ["*.example.com"], "private": ["10.1.2.3:8080"]}}'
        raise StartError(f"PAWL_EGRESS_FILE: {path} must be JSON like {form}: {error}") from None
    except ValueError as error:
        raise StartError(f"PAWL_EGRESS_FILE: {path}: {error}") from None
