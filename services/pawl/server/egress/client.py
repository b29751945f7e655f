"""Outbound requests, with limits on time and size. Each request and each redirect must be allowed by the rules."""

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

from pawl.chassis.ids import StoreId
from pawl.chassis.process import logs
from pawl.chassis.process.start import StartError
from pawl.server.egress.addresses import Address, Lookups
from pawl.server.egress.policy import EgressRefused, EgressRules, Target, read_rules, read_target, rules_of
from pawl.server.egress.transport import GuardedTransport

_GZIP: Final = 16 + zlib.MAX_WBITS


class CodingError(Exception):
    """Raised when a body does not match its Content-Encoding, or has a coding that was not requested."""


class Unpacker:
    """A decompressor for a body that arrives in parts. It stops once the result is too long.

    Even a decompression bomb yields at most `bytes_max` + 1 bytes.

    Raises:
        CodingError: The coding is neither gzip nor identity, or the body is corrupt.
    """

    def __init__(self, coding: str, *, bytes_max: int) -> None:
        self.body = bytearray()
        self._bytes_max = bytes_max
        coding = coding.strip().lower()
        self._is_packed = coding in ("gzip", "x-gzip")
        if not self._is_packed and coding not in ("", "identity"):
            raise CodingError("the body's content encoding was not requested")
        self._inflate: zlib._Decompress | None = None

    @property
    def is_full(self) -> bool:
        return len(self.body) > self._bytes_max

    def feed(self, part: bytes) -> None:
        if not self._is_packed:
            self.body += part[: self._bytes_max + 1 - len(self.body)]
            return
        while part and not self.is_full:
            if self._inflate is None:
                self._inflate = zlib.decompressobj(_GZIP)
            try:
                self.body += self._inflate.decompress(part, self._bytes_max + 1 - len(self.body))
            except zlib.error:
                raise CodingError("the compressed body is corrupt") from None
            if self._inflate.eof:
                # RFC 1952, 2.2: a gzip file may have several members. Some servers pad it with NULs.
                part, self._inflate = self._inflate.unused_data.lstrip(b"\0"), None
            else:
                part = self._inflate.unconsumed_tail

    def end(self) -> None:
        if self._inflate is not None:
            raise CodingError("the compressed body is truncated")


REDIRECTS_MAX: Final = 5


class RequestFailed(Exception):
    """Raised when no usable response arrived. The message may be shown to the model."""

    def __init__(self, message: str, *, was_sent: bool, lookup: asyncio.Future[Sequence[str]] | None = None) -> None:
        super().__init__(message)
        # True if the server may have received the request, which means that the request may have taken effect.
        self.was_sent = was_sent
        # A lookup that may still be running, because its thread cannot be stopped.
        self.lookup = lookup


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundRequest:
    """A request. Only GET and HEAD requests follow redirects. No other request is ever sent twice."""

    url: str
    method: str = "GET"
    # A redirect to another origin gets only Accept and Accept-Language.
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    # The timeout for everything, including lookups, redirects and the body.
    timeout_seconds: float = 20.0
    # The limit on the body's size, both compressed and decompressed. If it is 0, the body is not read.
    bytes_max: int = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundResponse:
    status: int
    # The final URL after redirects.
    url: str
    # The header unchanged; empty if absent.
    content_type: str
    body: bytes
    # True if the body was longer than `bytes_max`.
    is_cut: bool
    # The header unchanged; empty if absent.
    retry_after: str = ""


class Egress(Protocol):
    """Outbound HTTP requests on behalf of a store. All code that fetches URLs for a store uses this."""

    def check(self, store_id: StoreId, url: str, *, with_secrets: bool = False) -> None:
        """Check a URL against the rules without resolving its host.

        Secrets may be sent over https, or to a host that the deployment allows explicitly.

        Raises:
            EgressRefused: The rules do not allow the URL.
        """

    async def send(self, store_id: StoreId, request: OutboundRequest) -> OutboundResponse:
        """Send a request and follow its redirects. Return the final response, whatever its status.

        For each hop, this checks the host and all its addresses, and connects to one of these addresses. Safe to
        cancel.

        Raises:
            EgressRefused: The request or a redirect is not allowed.
            RequestFailed: No usable response arrived.
        """


USER_AGENT: Final = "Pawl/0.1"

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_FOLLOWED: Final = frozenset({"GET", "HEAD"})
_FOR_ANY_ORIGIN: Final = frozenset({"accept", "accept-language"})

_LOG_SECONDS: Final = 60.0
# Maximum number of refusals to remember, so that each one is logged as a warning at most once a minute.
_LOGGED_MAX: Final = 1000

_log = logs.get_logger(__name__)


class GuardedEgress:
    """Implementation of Egress. If neither a store nor `*` has rules, the store may reach the public internet.

    Cookies are neither stored nor sent, and environment proxies are not used.
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

        With `with_secrets`, the transport only allows https, or hosts that the deployment allows explicitly.
        """
        rules = rules_of(self._rules, store_id)
        start_lookup = partial(self._lookups.start, store_id)
        return GuardedTransport(rules, start_lookup=start_lookup, tls=self._tls, with_secrets=with_secrets)

    def check(self, store_id: StoreId, url: str, *, with_secrets: bool = False) -> None:
        rules, target = rules_of(self._rules, store_id), read_target(url)
        rules.check_target(target)
        if with_secrets:
            rules.check_secrets(target)

    async def locate(self, store_id: StoreId, url: str) -> tuple[Target, Sequence[Address]]:
        """Return the target of a URL and its addresses, for protocols other than HTTP that send a password.

        Raises:
            EgressRefused: The deployment does not list the host, or forbids connections or secrets to it.
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
            message = f"no response from {sent.authority} within {request.timeout_seconds:g} s"
            raise RequestFailed(message, was_sent=sent.is_sent, lookup=transport.lookup) from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            raise RequestFailed(f"cannot connect to {sent.authority}", was_sent=False) from None
        except httpx2.LocalProtocolError:
            raise RequestFailed("the request is not valid HTTP", was_sent=False) from None
        except (httpx2.HTTPError, CodingError):
            # The library's messages may quote the request, and with it a secret.
            raise RequestFailed(f"{sent.authority} sent an invalid response", was_sent=sent.is_sent) from None

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
                # This is permanent, even if a later redirect returns to the first origin: the caller did not choose it.
                headers = {name: value for name, value in headers.items() if name.lower() in _FOR_ANY_ORIGIN}
            target = following


class _Sent:
    def __init__(self) -> None:
        self.authority = "the host"
        self.is_sent = False

    async def trace(self, event: str, _: object) -> None:
        """Record when httpcore starts to send the request."""
        self.is_sent = self.is_sent or event.endswith("send_request_headers.started")


def _join(target: Target, location: str) -> Target:
    try:
        return read_target(urljoin(target.url, location))
    except ValueError:
        raise EgressRefused("a redirect to an invalid URL") from None


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
    """Return the rules by store. The entry `*` applies to all other stores.

    The result is empty if there is no file.

    Raises:
        StartError: The file cannot be read, or has an invalid entry.
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
