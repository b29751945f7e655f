"""The caller: the bearer of a key, or a browser with the cookie of a session."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from pawl.agent.v1.whoami_pb2 import WhoAmIResponse
from pawl.chassis.process.clock import Clock
from pawl.chassis.process.settings import join_address
from pawl.errors import InvalidField, SessionExpired, Unauthenticated
from pawl.gateway.login import session
from pawl.gateway.login.session import Seal, Session
from pawl.gateway.services import PUBLIC, WHO_AM_I, Metadata, Services, write
from pawl.gateway.web import hosts as door
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
    """Gives sessions to browsers that bring a key, and knows them when they come back. It keeps none."""

    def __init__(self, seal: Seal, services: Services, clock: Clock, *, session_seconds: float) -> None:
        self._seal = seal
        self._services = services
        self._clock = clock
        self._session_seconds = session_seconds
        self._started_at = clock.now()

    def credential(self, request: Request) -> Metadata:
        """Return the metadata of the calls that a request is for.

        Raises:
            Unauthenticated: it has neither a key nor a session, or the session was not made here.
            InvalidField: its headers hold what no key and no name has.
            SessionExpired: the session is over.
            ForeignOrigin: it has a session, and another page may have made it.
        """
        if (shown := _shown(request)) is not None:
            return shown
        found = self.session(request)
        if self._clock.now() >= found.end_time:
            raise SessionExpired("Your session is over: log in again.")
        return found.metadata

    def session(self, request: Request) -> Session:
        """Return the session of the browser that a request comes from, also when that is over.

        Raises:
            Unauthenticated: it has none, or one that was not made here.
            ForeignOrigin: another page may have made the request.
        """
        sealed = request.cookies.get(session_cookie(request))
        if not sealed:
            raise Unauthenticated("Log in, or send Authorization: Bearer KEY.")
        door.check_page(request.method, request.headers)
        return self._seal.open(sealed, Session)

    def bearer(self, request: Request) -> Metadata:
        """Return the metadata of the calls that a request with a key is for; the session of a browser does not count.

        Raises:
            Unauthenticated: it has no key.
            InvalidField: see `credential`.
        """
        if (shown := _shown(request)) is None:
            raise Unauthenticated("Send Authorization: Bearer KEY: sessions of browsers do not count here.")
        return shown

    async def log_in(self, request: Request) -> Response:
        """Give a session to a browser whose user has a key, and say who that is."""
        door.check_page(request.method, request.headers)
        try:
            said = msgspec.convert(await read_json(request, _BYTES_MAX), _Login)
        except msgspec.ValidationError as error:
            raise InvalidField(f"This is no login: {error}", field="key") from None
        if said.code:
            # Where this very gateway was reached, whatever name was asked for.
            own = join_address(*request.scope["server"])
            said.key = self._seal.use_code(said.code, own, self._clock.now(), since=self._started_at)
        if not (key := said.key.strip()):
            raise InvalidField("A login needs a key.", field="key")
        found = Session(key=key, store=said.store, user=said.user, end_time=self._clock.now() + self._session_seconds)
        found, who = await self.who(found)
        response = answer(write(who))
        self.give(request, response, found)
        return response

    async def who(self, found: Session) -> tuple[Session, WhoAmIResponse]:
        """Return a session, which ends with its key at the latest, and who has it.

        Raises:
            InvalidField: it has what no key and no name has, or is too long.
            Unauthenticated: it does not count.
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
        """Let the browser that gets a response keep a session, also when that is over: then it may be renewed."""
        response.set_cookie(
            session_cookie(request),
            self._seal.close(found),
            max_age=int(self._session_seconds),
            httponly=True,
            samesite="strict",
            secure=is_secure(request),
        )

    def log_out(self, request: Request) -> Response:
        """Have the browser forget its session."""
        door.check_page(request.method, request.headers)
        response = answer({})
        for secure in (False, True):
            name = session.cookie_name(session.NAME, request.url.port, secure=secure)
            response.delete_cookie(name, httponly=True, samesite="strict", secure=secure)
        response.delete_cookie(
            renewal_cookie(request), path=LOGIN_PATH, httponly=True, samesite="strict", secure=is_secure(request)
        )
        return response


def _shown(request: Request) -> Metadata | None:
    """Return the metadata that the key in the headers stands for, if there is one."""
    door.check_caller(request.headers.keys())
    if (key := door.bearer(request.headers.get("authorization"))) is None:
        return None
    store, user = request.headers.get("pawl-store", ""), request.headers.get("pawl-user", "")
    return session.metadata(key, store=store, user=user)


def session_cookie(request: Request) -> str:
    """Return the name of the cookie of a session."""
    return session.cookie_name(session.NAME, request.url.port, secure=is_secure(request))


def renewal_cookie(request: Request) -> str:
    """Return the name of the cookie that renews a session of an identity provider; only LOGIN_PATH is sent it."""
    return session.cookie_name(_RENEWAL, request.url.port, secure=False)


def is_secure(request: Request) -> bool:
    """Return whether the cookie is for HTTPS only: everywhere but on this machine."""
    return request.url.scheme == "https" or not door.is_loopback(request.headers.get("host", ""))
