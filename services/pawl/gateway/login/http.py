"""Logins by identity providers: to the provider, back with a code, and on with its next token."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Final

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.errors import DependencyUnavailable, InvalidField, PawlError, SessionExpired, Unauthenticated
from pawl.gateway.login import rules as openid
from pawl.gateway.login import session
from pawl.gateway.login.callers import LOGIN_PATH, Callers, is_secure, renewal_cookie
from pawl.gateway.login.providers import Providers
from pawl.gateway.login.rules import Attempt, Provider, Renewal, Tokens
from pawl.gateway.login.session import Seal, Session
from pawl.gateway.services import write
from pawl.gateway.web import hosts as door
from pawl.gateway.web.answers import answer

_ATTEMPT: Final = "pawl_login"
_SEE_OTHER: Final = 303

_log = logs.get_logger(__name__)


class OpenIdLogins:
    """Gives sessions to browsers whose users log in at an identity provider. It keeps none."""

    def __init__(
        self,
        known: tuple[Provider, ...],
        *,
        providers: Providers,
        callers: Callers,
        seal: Seal,
        clock: Clock,
        session_seconds: float,
        public_url: str,
    ) -> None:
        self._known = known
        self._providers = providers
        self._callers = callers
        self._seal = seal
        self._clock = clock
        self._session_seconds = session_seconds
        self._public_url = public_url

    async def list(self, _: Request) -> Response:
        """Answer `GET /login/providers`: the names and titles of those by whom one logs in."""
        return answer({"providers": [{"name": each.name, "title": each.title} for each in self._known]})

    async def begin(self, request: Request) -> Response:
        """Answer `GET /login/openid/{name}`: send the browser to the provider."""
        provider = openid.find(self._known, request.path_params["name"])
        to = request.query_params.get("to", "/")
        attempt = openid.begin(provider, to, self._clock.now(), lambda: secrets.token_urlsafe(32))
        try:
            endpoint = (await self._providers.endpoints(provider)).authorization_endpoint
        except DependencyUnavailable:
            return RedirectResponse("/#login=away", _SEE_OTHER)
        url = openid.authorization_url(provider, endpoint, attempt, self._return_url(request, provider))
        response = RedirectResponse(url, _SEE_OTHER)
        # Lax: the browser comes back from another site.
        response.set_cookie(
            _attempt_name(request),
            self._seal.close(attempt),
            max_age=int(openid.ATTEMPT_SECONDS),
            httponly=True,
            samesite="lax",
            secure=is_secure(request),
        )
        return response

    async def finish(self, request: Request) -> Response:
        """Answer `GET /login/return/{name}`: the browser is back from the provider, with a code or without."""
        try:
            response = await self._finish(request)
        except PawlError as error:
            _log.warning("openid.login_failed", reason=error.reason, error=error.message)
            why = "away" if isinstance(error, DependencyUnavailable) else "refused"
            response = RedirectResponse(f"/#login={why}", _SEE_OTHER)
        secure = is_secure(request)
        response.delete_cookie(_attempt_name(request), httponly=True, samesite="lax", secure=secure)
        return response

    async def renew(self, request: Request) -> Response:
        """Answer `POST /login/renew`: the session goes on with the next token of its provider."""
        door.check_page(request.method, request.headers)
        over = SessionExpired("Your session is over: log in again.")
        sealed = request.cookies.get(renewal_cookie(request))
        if not sealed:
            raise over
        renewal, found = self._seal.open(sealed, Renewal), self._callers.session(request)
        if renewal.renewal_id != found.renewal_id or self._clock.now() >= renewal.end_time:
            raise over
        provider = openid.find(self._known, renewal.provider)
        tokens = await self._providers.tokens(provider, openid.renewal_form(provider, renewal.refresh_token))
        key = openid.key_of(provider, tokens, None)
        found, who = await self._callers.who(Session(key=key, renewal_id=renewal.renewal_id, end_time=renewal.end_time))
        if renewal.credential_id != who.caller.credential_id:
            raise SessionExpired("The provider renewed the login of another user: log in again.")
        response = answer(write(who))
        self._callers.give(request, response, found)
        self._keep(request, response, tokens, renewal)
        return response

    async def log_out(self, request: Request) -> Response:
        """Answer `POST /login/out`: the browser forgets its session, and the provider the right to renew it."""
        response = self._callers.log_out(request)
        if sealed := request.cookies.get(renewal_cookie(request)):
            with suppress(Unauthenticated, InvalidField):
                renewal = self._seal.open(sealed, Renewal)
                await self._providers.revoke(openid.find(self._known, renewal.provider), renewal.refresh_token)
        return response

    async def _finish(self, request: Request) -> Response:
        said = request.query_params
        attempt = self._seal.open(request.cookies.get(_attempt_name(request), ""), Attempt)
        provider = openid.find(self._known, attempt.provider)
        now = self._clock.now()
        state = said.get("state", "") if request.path_params["name"] == provider.name else ""
        issuer = said.get("iss", "")
        says_issuer = (await self._providers.endpoints(provider)).authorization_response_iss_parameter_supported
        openid.check_return(attempt, state=state, issuer=issuer, provider=provider, says_issuer=says_issuer, now=now)
        if "code" not in said:
            raise Unauthenticated(f"The provider says {said.get('error', 'nothing')[:64]!r}.")
        form = openid.code_form(provider, said["code"], attempt, self._return_url(request, provider))
        tokens = await self._providers.tokens(provider, form)
        end_time, renewal_id = now + self._session_seconds, secrets.token_urlsafe(16)
        key = openid.key_of(provider, tokens, attempt.nonce)
        found, who = await self._callers.who(Session(key=key, renewal_id=renewal_id, end_time=end_time))
        response = RedirectResponse(attempt.to, _SEE_OTHER)
        self._callers.give(request, response, found)
        renewal = Renewal(
            renewal_id=renewal_id,
            provider=provider.name,
            credential_id=who.caller.credential_id,
            refresh_token="",
            end_time=end_time,
        )
        self._keep(request, response, tokens, renewal)
        return response

    def _keep(self, request: Request, response: Response, tokens: Tokens, renewal: Renewal) -> None:
        """Let the browser keep its right to the next token, if the provider has given one that a cookie can hold."""
        if not tokens.refresh_token:
            return
        sealed = self._seal.close(replace(renewal, refresh_token=tokens.refresh_token))
        if len(sealed) > session.COOKIE_BYTES_MAX:
            _log.warning("openid.refresh_token_too_long", provider=renewal.provider, sealed_bytes=len(sealed))
            return
        response.set_cookie(
            renewal_cookie(request),
            sealed,
            max_age=int(renewal.end_time - self._clock.now()),
            path=LOGIN_PATH,
            httponly=True,
            samesite="strict",
            secure=is_secure(request),
        )

    def _return_url(self, request: Request, provider: Provider) -> str:
        """Return where a provider sends the browser back: each to an address of its own (RFC 9700, 4.4)."""
        host = request.headers.get("host", "")
        # What ends TLS before a gateway does not have to say so; on this machine nothing does.
        own = f"{request.url.scheme}://{host}" if door.is_loopback(host) else self._public_url
        return f"{own}{LOGIN_PATH}/return/{provider.name}"


def _attempt_name(request: Request) -> str:
    return session.cookie_name(_ATTEMPT, request.url.port, secure=is_secure(request))
