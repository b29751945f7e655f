"""The seal of what a browser keeps: nobody but the gateways of a deployment can read and make it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec
from cryptography.fernet import InvalidToken

from pawl.chassis.identity import browser_seal
from pawl.errors import Unauthenticated
from pawl.gateway.login.rules import Attempt, Renewal
from pawl.gateway.login.session import Session

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
