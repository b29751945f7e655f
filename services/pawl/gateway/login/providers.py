"""An HTTP client for identity providers' discovery and token endpoints."""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Final

import httpx2
import msgspec

from pawl.chassis.process import logs
from pawl.chassis.process.address import is_safe_url
from pawl.chassis.process.clock import Clock
from pawl.errors import DependencyUnavailable, Unauthenticated
from pawl.gateway.login import rules as openid
from pawl.gateway.login.rules import Provider, Tokens
from pawl.server.identity.discovery import Description, FetchFailed, describe, open_client, read_at_most

_KEEP_SECONDS: Final = 300.0
_KEEP_FAILURE_SECONDS: Final = 5.0
_SECONDS_MAX: Final = 10.0
_BYTES_MAX: Final = 64 * 1024
_Url = Annotated[str, msgspec.Meta(max_length=1024)]

_log = logs.get_logger(__name__)


class Endpoints(Description, frozen=True):
    """A provider's endpoints (OpenID Connect Discovery 1.0, section 3)."""

    authorization_endpoint: _Url
    token_endpoint: _Url
    revocation_endpoint: _Url = ""
    # True if the provider's responses include the issuer (RFC 9207).
    authorization_response_iss_parameter_supported: bool = False


class _Refusal(msgspec.Struct, frozen=True):
    error: str = ""


class Providers:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, Endpoints | DependencyUnavailable]] = {}
        self._asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """The system's CA certificates, loaded on the first login."""
        return httpx2.create_ssl_context()

    async def endpoints(self, provider: Provider) -> Endpoints:
        """Return the endpoints from the discovery document, which is cached for five minutes.

        Raises:
            DependencyUnavailable: Discovery failed or its result is invalid. The failure is cached for five seconds.
        """
        async with self._asking[provider.issuer]:
            until, found = self._known.get(provider.issuer, (0.0, None))
            if found is None or self._clock.monotonic() >= until:
                try:
                    found, seconds = await self._ask(provider), _KEEP_SECONDS
                except DependencyUnavailable as error:
                    found, seconds = error, _KEEP_FAILURE_SECONDS
                self._known[provider.issuer] = (self._clock.monotonic() + seconds, found)
        if isinstance(found, DependencyUnavailable):
            raise DependencyUnavailable(found.message)
        return found

    async def _ask(self, provider: Provider) -> Endpoints:
        try:
            async with asyncio.timeout(_SECONDS_MAX), open_client(self._tls) as client:
                found = await describe(client, provider.issuer, Endpoints)
        except (TimeoutError, FetchFailed, httpx2.HTTPError, httpx2.InvalidURL, msgspec.MsgspecError) as error:
            raise _unavailable(provider, error) from None
        for url in filter(None, (found.authorization_endpoint, found.token_endpoint, found.revocation_endpoint)):
            if not is_safe_url(url.partition("?")[0]):
                raise _unavailable(provider, ValueError("its endpoints are not https:// URLs"))
        return found

    async def revoke(self, provider: Provider, refresh_token: str) -> None:
        """Revoke a refresh token if the provider supports it (RFC 7009). Failures are logged."""
        try:
            url = (await self.endpoints(provider)).revocation_endpoint
            if url:
                status, _ = await self._post(provider, url, openid.revocation_form(provider, refresh_token))
                _log.info("openid.revoked", issuer=provider.issuer, status=status)
        except DependencyUnavailable:
            pass  # Already logged.

    async def tokens(self, provider: Provider, form: Mapping[str, str]) -> Tokens:
        """Exchange a code or a refresh token for tokens.

        Raises:
            Unauthenticated: The provider refused.
            DependencyUnavailable: The provider does not respond, or its response is invalid.
        """
        endpoints = await self.endpoints(provider)
        status, content = await self._post(provider, endpoints.token_endpoint, form)
        if status in {400, 401, 403}:
            _log.warning("openid.refused", issuer=provider.issuer, status=status, error=_code(content))
            raise Unauthenticated("The provider refused this login. Log in again.")
        try:
            if status != httpx2.codes.OK:
                raise FetchFailed(f"status {status}")
            return msgspec.json.decode(content, type=Tokens)
        except (FetchFailed, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _unavailable(provider, error) from None

    async def _post(self, provider: Provider, url: str, form: Mapping[str, str]) -> tuple[int, bytes]:
        header = openid.authorization(provider)
        headers = {"accept": "application/json"} | ({"authorization": header} if header else {})
        try:
            async with (
                asyncio.timeout(_SECONDS_MAX),
                open_client(self._tls) as client,
                client.stream("POST", url, data=dict(form), headers=headers) as response,
            ):
                return response.status_code, await read_at_most(response, _BYTES_MAX)
        except (TimeoutError, FetchFailed, httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise _unavailable(provider, error) from None


def _code(content: bytes) -> str:
    """Return the error code (RFC 6749, 5.2), which helps operators find misconfigurations."""
    try:
        return msgspec.json.decode(content, type=_Refusal).error[:64]
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _unavailable(provider: Provider, error: Exception) -> DependencyUnavailable:
    _log.warning("openid.unreachable", issuer=provider.issuer, error=f"{type(error).__name__}: {error}"[:200])
    return DependencyUnavailable("The identity provider is not responding. Try again later.")
