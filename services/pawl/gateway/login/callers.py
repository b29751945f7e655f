"""Identifies callers by a bearer key or a browser's session cookie."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from pawl.agent.v1.whoami_pb2 import WhoAmIResponse
from pawl.chassis.process.address import join_address
from pawl.chassis.process.clock import Clock
from pawl.errors import InvalidField, SessionExpired, Unauthenticated
from pawl.gateway.login import session
from pawl.gateway.login.session import Seal, Session
from pawl.gateway.services import PUBLIC, WHO_AM_I, Metadata, Services, write
from pawl.gateway.web import hosts
from pawl.gateway.web.answers import answer, read_json

_DEADLINE_SECONDS: Final = 10.0
_BYTES_MAX: Final = 16 * 1024
LOGIN_PATH: Final = "/login"
_RENEWAL: Final = "pawl_renewal"


class _Login(msgspec.Struct, forbid_unknown_fields=True):
    key: str = ""
    code: str = ""
    store: str = ""
    user: str = ""


class Callers:
    """Browser sessions, which are created for keys and read from requests. All state is in the cookies."""

    def __init__(
        self, seal: Seal, services: Services, clock: Clock, *, session_seconds: float, problems_file: Path
    ) -> None:
        self._seal = seal
        self._services = services
        self._clock = clock
        self._session_seconds = session_seconds
        self._started_at = clock.now()
        self._problems_file = problems_file

    def credential(self, request: Request) -> Metadata:
        """Return the call metadata for a request.

        Raises:
            Unauthenticated: The request has neither a key nor a valid session.
            InvalidField: The request's headers have invalid characters or are repeated.
            SessionExpired: The session has expired.
            ForeignOrigin: The request has a session but may come from another page.
        """
        if (metadata := _key_metadata(request)) is not None:
            return metadata
        found = self.session(request)
        if self._clock.now() >= found.end_time:
            raise SessionExpired("Your session has expired. Log in again.")
        return found.metadata

    def session(self, request: Request) -> Session:
        """Return a request's session, even if it has expired.

        Raises:
            Unauthenticated: There is no session, or this gateway did not create it.
            ForeignOrigin: The request may come from another page.
        """
        sealed = request.cookies.get(session_cookie(request))
        if not sealed:
            raise Unauthenticated("Log in, or send Authorization: Bearer KEY.")
        hosts.check_page(request.method, request.headers)
        return self._seal.open(sealed, Session)

    def bearer(self, request: Request) -> Metadata:
        """Return the call metadata for a request with a key. Browser sessions are not accepted.

        Raises:
            Unauthenticated: The request has no key.
            InvalidField: See `credential`.
        """
        if (metadata := _key_metadata(request)) is None:
            raise Unauthenticated("Send Authorization: Bearer KEY. Browser sessions are not accepted here.")
        return metadata

    async def log_in(self, request: Request) -> Response:
        """Create a session for a key and return the user's identity."""
        hosts.check_page(request.method, request.headers)
        try:
            login = msgspec.convert(await read_json(request, _BYTES_MAX), _Login)
        except msgspec.ValidationError as error:
            raise InvalidField(f"The login is invalid: {error}", field="key") from None
        if login.code:
            # This gateway's address, regardless of the Host header.
            own = join_address(*request.scope["server"])
            login.key = self._seal.use_code(login.code, own, self._clock.now(), since=self._started_at)
        if not (key := login.key.strip()):
            raise InvalidField("A key is required.", field="key")
        found = Session(key=key, store=login.store, user=login.user, end_time=self._clock.now() + self._session_seconds)
        found, who = await self.who(found)
        response = answer(write(who))
        self.give(request, response, found)
        return response

    async def state(self, request: Request) -> Response:
        """Handle `GET /login/state`: return whether there is a session and, if so, the problems from `pawl dev`.

        Without `pawl dev`, `problems` is absent.
        """
        if not request.cookies.get(session_cookie(request)):
            return answer({"session": False})
        self.session(request)
        try:
            problems = await asyncio.to_thread(self._problems_file.read_bytes)
        except OSError:
            return answer({"session": True})
        return answer({"session": True, "problems": msgspec.Raw(problems)})

    async def who(self, found: Session) -> tuple[Session, WhoAmIResponse]:
        """Check a session. Return it with its user. The returned session expires with its key at the latest.

        Raises:
            InvalidField: The session has invalid characters or is too long.
            Unauthenticated: The key is not accepted.
        """
        session.check_sealed(self._seal.close(found))
        asked = PUBLIC[WHO_AM_I].request()
        who: WhoAmIResponse = await self._services.call(
            WHO_AM_I, asked, found.metadata, timeout_seconds=_DEADLINE_SECONDS
        )
        if who.caller.HasField("expire_time"):
            found = replace(found, end_time=min(found.end_time, who.caller.expire_time.ToNanoseconds() / 1e9))
        return found, who

    def give(self, request: Request, response: Response, found: Session) -> None:
        """Set the session cookie. The cookie outlives the session, so that the session can be renewed."""
        response.set_cookie(
            session_cookie(request),
            self._seal.close(found),
            max_age=int(self._session_seconds),
            httponly=True,
            samesite="strict",
            secure=is_secure(request),
        )

    def log_out(self, request: Request) -> Response:
        hosts.check_page(request.method, request.headers)
        response = answer({})
        for secure in (False, True):
            name = session.cookie_name(session.NAME, request.url.port, secure=secure)
            response.delete_cookie(name, httponly=True, samesite="strict", secure=secure)
        response.delete_cookie(
            renewal_cookie(request), path=LOGIN_PATH, httponly=True, samesite="strict", secure=is_secure(request)
        )
        return response


def _key_metadata(request: Request) -> Metadata | None:
    hosts.check_caller(request.headers.keys())
    if (key := hosts.bearer(request.headers.get("authorization"))) is None:
        return None
    store, user = request.headers.get("pawl-store", ""), request.headers.get("pawl-user", "")
    return session.metadata(key, store=store, user=user)


def session_cookie(request: Request) -> str:
    return session.cookie_name(session.NAME, request.url.port, secure=is_secure(request))


def renewal_cookie(request: Request) -> str:
    """Return the name of the cookie that renews a provider login. Browsers send the cookie only to LOGIN_PATH."""
    return session.cookie_name(_RENEWAL, request.url.port, secure=False)


def is_secure(request: Request) -> bool:
    """Return whether cookies require HTTPS: always, except over plain HTTP to a loopback host."""
    return request.url.scheme == "https" or not hosts.is_loopback(request.headers.get("host", ""))
