"""The session of a browser: what it is given to come back with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec
from cryptography.fernet import InvalidToken

from pawl.chassis.identity import browser_seal
from pawl.errors import InvalidField, Unauthenticated
from pawl.gateway.login.rules import Attempt, Renewal

COOKIE_BYTES_MAX: Final = 3900
"""Most bytes of a cookie, by which browsers keep it whole."""
NAME: Final = "pawl_session"


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The credential of a caller, and until when the browser may use it without asking for it again."""

    key: str
    end_time: float
    """Unix seconds."""
    store: str = ""
    user: str = ""
    renewal_id: str = ""
    """The id of the renewal with which it goes on; empty for none."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of the calls that are made for it."""
        return metadata(self.key, store=self.store, user=self.user)


def metadata(key: str, *, store: str = "", user: str = "") -> tuple[tuple[str, str], ...]:
    """Return the metadata of the calls that are made with a key.

    Raises:
        InvalidField: metadata cannot hold it; neither a key nor a name of anything looks like that.
    """
    for field, value in (("key", key), ("pawl-store", store), ("pawl-user", user)):
        if not (value.isascii() and value.isprintable()):
            raise InvalidField(f"{field} has characters that no {field} has: send it as it was given.", field=field)
    named = (("pawl-store", store), ("pawl-user", user))
    return (("authorization", f"Bearer {key}"), *((name, value) for name, value in named if value))


def cookie_name(name: str, port: int | None, *, secure: bool) -> str:
    """Return the name of a cookie; over HTTPS one that no other host and no page without TLS can set.

    Browsers share cookies among the ports of a host, so the name has the port.
    """
    return f"{'__Host-' if secure else ''}{name}{f'_{port}' if port else ''}"


def check_sealed(sealed: str) -> str:
    """Return what a cookie is to hold.

    Raises:
        InvalidField: no browser would keep it.
    """
    if len(sealed) > COOKIE_BYTES_MAX:
        raise InvalidField(
            "The key is too long for a cookie: log in with an API key, or send it with each request.", field="key"
        )
    return sealed


Sealed = Session | Attempt | Renewal
S = TypeVar("S", Session, Attempt, Renewal)


_PURPOSES: Final[Mapping[type[Sealed], str]] = {Session: "session", Attempt: "login", Renewal: "renewal"}


class Seal:
    """Seals and opens what a browser keeps, and opens the codes that log a browser in once."""

    def __init__(self, keys: str) -> None:
        self._keys = keys
        self._boxes = {kind: browser_seal.box(keys, purpose) for kind, purpose in _PURPOSES.items()}
        self._used: dict[str, float] = {}

    def close(self, content: Sealed) -> str:
        """Return a session, or what leads to one, as text for a cookie."""
        return self._boxes[type(content)].encrypt(msgspec.json.encode(content)).decode()

    def open(self, sealed: str, kind: type[S]) -> S:
        """Return what was sealed.

        Raises:
            Unauthenticated: no gateway with one of these keys has sealed it so, and as that.
        """
        try:
            return msgspec.json.decode(self._boxes[kind].decrypt(sealed.encode()), type=kind)
        except (InvalidToken, msgspec.DecodeError, UnicodeEncodeError):
            raise Unauthenticated("This session was not made here: log in.") from None

    def use_code(self, text: str, gateway: str, now: float, *, since: float) -> str:
        """Return the key that a code stands for, once.

        Raises:
            Unauthenticated: it is none of this gateway, was used, is too old, or was made before `since`, when it may
                have been used.
        """
        self._used = {nonce: end_time for nonce, end_time in self._used.items() if end_time > now}
        code = browser_seal.read(self._keys, text)
        if (
            code is None
            or code.gateway != gateway
            or not now < code.end_time >= since + browser_seal.CODE_SECONDS
            or code.nonce in self._used
        ):
            raise Unauthenticated("This link was used or is too old: `pawl console` makes another one.")
        self._used[code.nonce] = code.end_time
        return code.key
