"""Browser sessions, sealed in cookies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from pawl.errors import InvalidField, Unauthenticated
from pawl.gateway.login.rules import Attempt, Renewal
from pawl.server.identity import browser_seal

# Size of the largest cookie that browsers keep.
COOKIE_BYTES_MAX: Final = 3900
NAME: Final = "pawl_session"


class Session(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    # Unix seconds.
    end_time: float
    store: str = ""
    user: str = ""
    # The id of the renewal that can extend the session; empty if there is none.
    renewal_id: str = ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return metadata(self.key, store=self.store, user=self.user)


def metadata(key: str, *, store: str = "", user: str = "") -> tuple[tuple[str, str], ...]:
    """Return the call metadata for a key.

    Raises:
        InvalidField: A value has characters that are not allowed in metadata.
    """
    for field, value in (("key", key), ("pawl-store", store), ("pawl-user", user)):
        if not (value.isascii() and value.isprintable()):
            raise InvalidField(f"{field} has invalid characters. Send it unchanged.", field=field)
    named = (("pawl-store", store), ("pawl-user", user))
    return (("authorization", f"Bearer {key}"), *((name, value) for name, value in named if value))


def cookie_name(name: str, port: int | None, *, secure: bool) -> str:
    """Return a cookie's name. Only this host can set a secure cookie, and only over TLS.

    The name contains the port, because browsers share cookies between a host's ports.
    """
    return f"{'__Host-' if secure else ''}{name}{f'_{port}' if port else ''}"


def check_sealed(sealed: str) -> str:
    """Return a sealed value if it fits into a cookie.

    Raises:
        InvalidField: The value is too long.
    """
    if len(sealed) > COOKIE_BYTES_MAX:
        raise InvalidField(
            "The key is too long for a cookie. Log in with an API key, or send the key with each request.", field="key"
        )
    return sealed


Sealed = Session | Attempt | Renewal
S = TypeVar("S", Session, Attempt, Renewal)


_PURPOSES: Final[Mapping[type[Sealed], str]] = {Session: "session", Attempt: "login", Renewal: "renewal"}


class Seal:
    """Encrypts and decrypts cookies, and opens one-time login codes."""

    def __init__(self, keys: str) -> None:
        self._keys = keys
        self._used: dict[str, float] = {}

    def close(self, content: Sealed) -> str:
        """Encrypt a value for a cookie."""
        return browser_seal.seal(self._keys, _PURPOSES[type(content)], msgspec.json.encode(content))

    def open(self, sealed: str, kind: type[S]) -> S:
        """Decrypt a value.

        Raises:
            Unauthenticated: The value was not sealed with one of these keys for this purpose.
        """
        content = browser_seal.unseal(self._keys, _PURPOSES[kind], sealed)
        try:
            return msgspec.json.decode(content or b"", type=kind)
        except msgspec.DecodeError:
            raise Unauthenticated("This session is not valid here. Log in.") from None

    def use_code(self, text: str, gateway: str, now: float, *, since: float) -> str:
        """Return the key in a one-time login code.

        Raises:
            Unauthenticated: The code is for another gateway, has been used, has expired, or was created before `since`
                and may have been used.
        """
        self._used = {nonce: end_time for nonce, end_time in self._used.items() if end_time > now}
        code = browser_seal.read(self._keys, text)
        if (
            code is None
            or code.gateway != gateway
            or not now < code.end_time >= since + browser_seal.CODE_SECONDS
            or code.nonce in self._used
        ):
            raise Unauthenticated("This link was used or has expired. Run `pawl console` for a new one.")
        self._used[code.nonce] = code.end_time
        return code.key
