"""An HTTP transport that resolves a name once, checks all its addresses and connects to one of them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, cast

import h11
import httpcore2
import httpx2

from pawl.chassis.process.tasks import shield
from pawl.server.egress.addresses import Address, plain_address
from pawl.server.egress.policy import EgressRules, Target, no_address, read_target

# Maximum number of a host's addresses to try, one after another.
ADDRESSES_MAX: Final = 4
# Per address.
CONNECT_SECONDS: Final = 5.0

# Starts to look up a host; see `Lookups.start`.
StartLookup = Callable[[str, int], Awaitable[asyncio.Future[Sequence[str]]]]

# Maximum number of 1xx responses before the final one.
INFORMATIONAL_MAX: Final = 10


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Sends a request if the rules allow its host and all of the host's addresses.

    The name is resolved once and the connection uses a checked address, which prevents DNS rebinding. Certificate
    checks and the Host header still use the name. Connections are not reused, because a connection opened for one name
    must not serve another name with the same address. Environment proxies are not used.

    A client that uses this transport must not follow redirects blindly. Each request is checked here, but the client is
    responsible for the headers that it sends.

    Raises, in addition to httpx2's errors:
        EgressRefused: The rules forbid the request. Nothing was sent, and no connection was opened.
    """

    def __init__(
        self,
        rules: EgressRules,
        *,
        start_lookup: StartLookup,
        tls: ssl.SSLContext,
        with_secrets: bool = False,
    ) -> None:
        self._rules = rules
        self._with_secrets = with_secrets
        self._start_lookup = start_lookup
        self._tls = tls
        # The last lookup. It continues when the request is cancelled, because its thread cannot be stopped.
        self.lookup: asyncio.Future[Sequence[str]] | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        target = read_target(str(request.url))
        *others, last = await self.addresses(target)
        for address in others:
            try:
                return await self._send(request, target, address)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                continue  # Nothing was sent yet, so the next address can be tried.
        return await self._send(request, target, last)

    async def addresses(self, target: Target) -> list[Address]:
        """Return at least one allowed address of a target. Preferred addresses come first.

        Raises:
            EgressRefused: The target is not allowed.
        """
        self._rules.check_target(target)
        if self._with_secrets:
            self._rules.check_secrets(target)
        addresses = await self._addresses(target)
        self._rules.check_addresses(target, addresses)
        return addresses[:ADDRESSES_MAX]

    async def _addresses(self, target: Target) -> list[Address]:
        if target.address is not None:
            return [target.address]
        try:
            self.lookup = lookup = await self._start_lookup(target.host, target.port)
            return list(dict.fromkeys(map(plain_address, await shield(lookup))))
        except (OSError, ValueError):
            raise no_address(target) from None

    async def _send(self, request: httpx2.Request, target: Target, address: Address) -> httpx2.Response:
        headers = request.headers.copy()
        headers["Host"] = target.authority
        timeouts: dict[str, Any] = dict(request.extensions.get("timeout", {}))
        timeouts["connect"] = min(timeouts.get("connect") or CONNECT_SECONDS, CONNECT_SECONDS)
        extensions = {**request.extensions, "timeout": timeouts, "target": target.target.encode("ascii")}
        if target.address is None:
            extensions["sni_hostname"] = target.host
        literal = f"[{address}]" if address.version == 6 else str(address)  # noqa: PLR2004  # IPv6
        pinned = httpx2.Request(
            request.method,
            f"{target.scheme}://{literal}:{target.port}/",
            headers=headers,
            stream=request.stream,
            extensions=extensions,
        )
        connection = _OneRequest(self._tls)
        try:
            response = await connection.handle_async_request(pinned)
        except BaseException:
            await connection.aclose()
            raise
        stream = cast("httpx2.AsyncByteStream", response.stream)
        return httpx2.Response(
            response.status_code,
            headers=response.headers,
            stream=_Stream(stream, connection),
            extensions=response.extensions,
        )


class _OneRequest(httpx2.AsyncHTTPTransport):
    """A transport for one request, without environment proxies."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._pool = _Pool(ssl_context=tls, max_connections=1, max_keepalive_connections=0)


class _Pool(httpcore2.AsyncConnectionPool):
    def create_connection(self, origin: httpcore2.Origin) -> _Connection:
        return _Connection(origin, ssl_context=self._ssl_context)


class _Connection(httpcore2.AsyncHTTPConnection):
    async def handle_async_request(self, request: httpcore2.Request) -> httpcore2.Response:
        try:
            stream = await self._connect(request)
        except BaseException:
            self._connect_failed = True
            raise
        self._connection = _Http11(self._origin, stream)
        return await self._connection.handle_async_request(request)


class _Http11(httpcore2.AsyncHTTP11Connection):
    """An HTTP/1.1 connection that limits 1xx responses.

    httpcore itself would read them without limit and without yielding.
    """

    _informational = 0

    async def _receive_event(self, timeout: float | None = None) -> h11.Event | type[h11.PAUSED]:
        event = await super()._receive_event(timeout)
        self._informational += isinstance(event, h11.InformationalResponse)
        if self._informational > INFORMATIONAL_MAX:
            raise httpcore2.RemoteProtocolError(f"more than {INFORMATIONAL_MAX} informational responses")
        return event


class _Stream(httpx2.AsyncByteStream):
    def __init__(self, body: httpx2.AsyncByteStream, connection: httpx2.AsyncHTTPTransport) -> None:
        self._body = body
        self._connection = connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part

    async def aclose(self) -> None:
        try:
            await self._body.aclose()
        finally:
            await self._connection.aclose()
