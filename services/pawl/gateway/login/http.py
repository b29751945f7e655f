"""Logins with identity providers: redirect, callback with a code, and renewal."""

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
from pawl.gateway.web import hosts
from pawl.gateway.web.answers import answer

_ATTEMPT: Final = "pawl_login"
_SEE_OTHER: Final = 303

_log = logs.get_logger(__name__)


class OpenIdLogins:
    """Sessions for browsers whose users log in with an identity provider. All state is in cookies."""

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
        """Handle `GET /login/providers`: return the providers' names and titles."""
        return answer({"providers": [{"name": each.name, "title": each.title} for each in self._known]})

    async def redirect(self, request: Request) -> Response:
        """Handle `GET /login/openid/{name}`: redirect the browser to the provider."""
        provider = openid.find(self._known, request.path_params["name"])
        to = request.query_params.get("to", "/")
        attempt = openid.start_attempt(provider, to, self._clock.now(), lambda: secrets.token_urlsafe(32))
        try:
            endpoint = (await self._providers.endpoints(provider)).authorization_endpoint
        except DependencyUnavailable:
            return RedirectResponse("/#login=unavailable", _SEE_OTHER)
        url = openid.authorization_url(provider, endpoint, attempt, self._return_url(request, provider))
        response = RedirectResponse(url, _SEE_OTHER)
        # Lax, because the browser comes back from another site.
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
        """Handle `GET /login/return/{name}`, to which the provider redirects the browser, with or without a code."""
        try:
            response = await self._finish(request)
        except PawlError as error:
            _log.warning("openid.login_failed", reason=error.reason, error=error.message)
            why = "unavailable" if isinstance(error, DependencyUnavailable) else "refused"
            response = RedirectResponse(f"/#login={why}", _SEE_OTHER)
        secure = is_secure(request)
        response.delete_cookie(_attempt_name(request), httponly=True, samesite="lax", secure=secure)
        return response

    async def renew(self, request: Request) -> Response:
        """Handle `POST /login/renew`: continue the session with a new token from its provider."""
        hosts.check_page(request.method, request.headers)
        over = SessionExpired("Your session has expired. Log in again.")
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
            raise SessionExpired("The provider renewed another user's login. Log in again.")
        response = answer(write(who))
        self._callers.give(request, response, found)
        self._keep(request, response, tokens, renewal)
        return response

    async def log_out(self, request: Request) -> Response:
        """Handle `POST /login/out`: delete the session, and revoke the refresh token at the provider."""
        response = self._callers.log_out(request)
        if sealed := request.cookies.get(renewal_cookie(request)):
            with suppress(Unauthenticated, InvalidField):
                renewal = self._seal.open(sealed, Renewal)
                await self._providers.revoke(openid.find(self._known, renewal.provider), renewal.refresh_token)
        return response

    async def _finish(self, request: Request) -> Response:
        query = request.query_params
        attempt = self._seal.open(request.cookies.get(_attempt_name(request), ""), Attempt)
        provider = openid.find(self._known, attempt.provider)
        now = self._clock.now()
        state = query.get("state", "") if request.path_params["name"] == provider.name else ""
        issuer = query.get("iss", "")
        requires_issuer = (await self._providers.endpoints(provider)).authorization_response_iss_parameter_supported
        openid.check_return(
            attempt, state=state, issuer=issuer, provider=provider, requires_issuer=requires_issuer, now=now
        )
        if "code" not in query:
            raise Unauthenticated(f"The provider returned the error {query.get('error', '')[:64]!r}.")
        form = openid.code_form(provider, query["code"], attempt, self._return_url(request, provider))
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
        """Return the redirect URI, which is different for each provider (RFC 9700, 4.4)."""
        host = request.headers.get("host", "")
        # A proxy that terminates TLS may not report the scheme. On loopback, there is no proxy.
        own = f"{request.url.scheme}://{host}" if hosts.is_loopback(host) else self._public_url
        return f"{own}{LOGIN_PATH}/return/{provider.name}"


def _attempt_name(request: Request) -> str:
    return session.cookie_name(_ATTEMPT, request.url.port, secure=is_secure(request))
