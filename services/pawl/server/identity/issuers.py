"""Keeps the public keys of token issuers current through key rotation and outages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import httpx2
import msgspec

from pawl.chassis.identity.auth import Credential
from pawl.chassis.process import logs, tasks
from pawl.chassis.process.clock import Clock
from pawl.errors import DependencyUnavailable
from pawl.server.identity.discovery import Description, FetchFailed, describe, get, open_client
from pawl.server.identity.tokens import (
    KEYS_BYTES_MAX,
    Provider,
    PublicKey,
    Token,
    TokenRefused,
    check_claims,
    credential_of,
    fitting,
    is_signed,
    parse_keys,
    provider_of,
    read_token,
)

_REFRESH_SECONDS: Final = 300.0
_RETRY_SECONDS: Final = 30.0
_BURST_MAX: Final = 3
# At most _BURST_MAX fetches from an issuer start in this time, no matter how many tokens have unknown keys.
_BURST_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 10.0
_OUTAGE_SECONDS_MAX: Final = 24 * 3600.0
_FETCH_SECONDS_MAX: Final = 5.0

_log = logs.get_logger(__name__)

# Returns the keys of an issuer, from its URL and, if known, the URL of its keys; raises FetchFailed.
FetchKeys = Callable[[str, str | None], Awaitable[tuple[PublicKey, ...]]]


class KeyFetcher:
    """Fetches issuers' keys over HTTP. It follows no redirects, and limits the size and time of each fetch."""

    def __init__(self) -> None:
        self._tls = httpx2.create_ssl_context()

    async def __call__(self, issuer: str, jwks_url: str | None) -> tuple[PublicKey, ...]:
        try:
            async with asyncio.timeout(_FETCH_SECONDS_MAX), open_client(self._tls) as client:
                url = jwks_url or (await describe(client, issuer, Description)).jwks_uri
                return parse_keys(await get(client, url, KEYS_BYTES_MAX))
        except TimeoutError:
            raise FetchFailed("no answer in time") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, msgspec.MsgspecError, ValueError) as error:
            raise FetchFailed(f"{type(error).__name__}: {error}"[:200]) from None


class IssuerKeys:
    """The keys of one issuer. A key that is no longer published becomes invalid with the next fetch.

    While the issuer is unreachable, its last keys are used for up to a day.
    """

    def __init__(self, issuer: str, jwks_url: str | None, *, fetch: FetchKeys, clock: Clock) -> None:
        self._issuer = issuer
        self._jwks_url = jwks_url
        self._fetch = fetch
        self._clock = clock
        self._keys: tuple[PublicKey, ...] = ()
        self._fetched_at: float | None = None
        self._started_at: deque[float] = deque(maxlen=_BURST_MAX)
        self._is_down = False
        self._is_wanted = False
        self._fetching: asyncio.Task[None] | None = None

    async def fitting(self, token: Token, *, may_look_up: Callable[[], bool]) -> list[PublicKey]:
        """Return the keys that may have signed a token.

        If there is no such key, or if all keys are outdated, the keys are fetched first, provided that `may_look_up`
        allows it.

        Raises:
            DependencyUnavailable: The issuer does not answer, and none of the current keys can have signed the token.
        """
        found = fitting(self._keys, token)
        if not found or self._is_outdated():
            await self.refresh_if_allowed(may_look_up)
            found = fitting(self._keys, token)
        if self._is_outdated() or (self._is_down and not found):
            raise DependencyUnavailable(
                "the token cannot be checked right now because its issuer does not answer: try again later"
            )
        return found

    async def refresh_if_allowed(self, may_look_up: Callable[[], bool]) -> bool:
        """Fetch the keys if `may_look_up` allows it. Return whether a fetch was made.

        If `may_look_up` does not allow it, the next poll fetches the keys. A client with too many failures therefore
        cannot keep other clients at its address from using newly rotated keys.
        """
        if may_look_up():
            return await self.refresh()
        self._is_wanted = True
        return False

    async def refresh(self) -> bool:
        """Try to fetch the keys and return True.

        If they were fetched too often recently, return False without trying.
        """
        if self._fetching is None and len(self._started_at) == _BURST_MAX and self._since(0) < _BURST_SECONDS:
            return False
        await self._join_fetch()
        return True

    async def keep_fresh(self) -> None:
        """Fetch the keys regularly: every five minutes, and sooner after a failure or an unknown key."""
        is_soon = self._is_down or self._is_wanted
        if not self._started_at or self._since(-1) >= (_RETRY_SECONDS if is_soon else _REFRESH_SECONDS):
            await self._join_fetch()

    async def close(self) -> None:
        if self._fetching is not None:
            await tasks.end([self._fetching])

    def _is_outdated(self) -> bool:
        return self._fetched_at is None or self._clock.monotonic() - self._fetched_at > _OUTAGE_SECONDS_MAX

    def _since(self, which: int) -> float:
        return self._clock.monotonic() - self._started_at[which]

    async def _join_fetch(self) -> None:
        """Fetch the keys once for all concurrent callers. The fetch continues if a caller is cancelled."""
        if self._fetching is None:
            self._started_at.append(self._clock.monotonic())
            self._is_wanted = False
            self._fetching = asyncio.get_running_loop().create_task(self._fetch_keys(), name="issuers.fetch")
        await tasks.shield(self._fetching)

    async def _fetch_keys(self) -> None:
        started_at = self._started_at[-1]
        try:
            keys = await self._fetch(self._issuer, self._jwks_url)
        except FetchFailed as error:
            self._is_down = True
            _log.warning("issuer.unreachable", issuer=self._issuer, error=str(error))
        else:
            if self._is_down or [key.key_id for key in keys] != [key.key_id for key in self._keys]:
                _log.info("issuer.keys", issuer=self._issuer, key_ids=[key.key_id for key in keys])
            self._keys, self._fetched_at, self._is_down = keys, started_at, False
        finally:
            self._fetching = None


class Issuers:
    def __init__(
        self, providers: Callable[[], Sequence[Provider]], *, clock: Clock, fetch: FetchKeys | None = None
    ) -> None:
        self._providers = providers
        self._clock = clock
        self._fetch = fetch or KeyFetcher()
        self._keys: dict[tuple[str, str | None], IssuerKeys] = {}

    async def credential(self, text: str, *, may_look_up: Callable[[], bool] = lambda: True) -> Credential:
        """Return the credential of a token. `may_look_up` is called before keys are fetched from the issuer.

        Raises:
            TokenRefused: The token is not valid.
            DependencyUnavailable: The keys cannot be fetched from the issuer.
        """
        token = read_token(text)
        provider = provider_of(self._providers(), token)
        check_claims(provider, token, self._clock.now())
        keys = self._keys_of(provider)
        found = await keys.fitting(token, may_look_up=may_look_up)
        is_good = is_signed(token, found)
        may_be_new = found and not is_good and token.key_id is None
        if may_be_new and await keys.refresh_if_allowed(may_look_up):
            is_good = is_signed(token, await keys.fitting(token, may_look_up=may_look_up))
        if not is_good:
            raise TokenRefused("the signature is wrong" if found else "its issuer has no such key")
        return credential_of(provider, token.claims)

    async def run(self) -> None:
        try:
            while True:
                await asyncio.gather(*(self._keys_of(provider).keep_fresh() for provider in self._providers()))
                await self._clock.sleep(_POLL_SECONDS)
        finally:
            for keys in self._keys.values():
                await keys.close()

    def _keys_of(self, provider: Provider) -> IssuerKeys:
        key = (provider.issuer, provider.jwks_url)
        if key not in self._keys:
            self._keys[key] = IssuerKeys(*key, fetch=self._fetch, clock=self._clock)
        return self._keys[key]
