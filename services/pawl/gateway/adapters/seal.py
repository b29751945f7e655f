"""The seal of sessions: what a browser keeps can be read and made by nobody but the gateways of a deployment."""

from __future__ import annotations

import msgspec
from cryptography.fernet import InvalidToken

from pawl.chassis import browser_seal
from pawl.errors import Unauthenticated
from pawl.gateway.domain.session import Session

_WRITE = msgspec.json.Encoder()
_READ = msgspec.json.Decoder(Session)


class Seal:
    """Seals and opens sessions, and opens the codes that log a browser in once."""

    def __init__(self, keys: str) -> None:
        self._keys = keys
        self._sessions = browser_seal.box(keys, "session")
        self._used: dict[str, float] = {}

    def close(self, session: Session) -> str:
        """Return a session as text for a cookie."""
        return self._sessions.encrypt(_WRITE.encode(session)).decode()

    def open(self, sealed: str) -> Session:
        """Return the session.

        Raises:
            Unauthenticated: no gateway with one of these keys has sealed it so.
        """
        try:
            return _READ.decode(self._sessions.decrypt(sealed.encode()))
        except (InvalidToken, msgspec.DecodeError, UnicodeEncodeError):
            raise Unauthenticated("This session was not made here: log in.") from None

    def use_code(self, text: str, gateway: str, now: float) -> str:
        """Return the key that a code stands for, once.

        Raises:
            Unauthenticated: it is none of this gateway, was used, or is too old.
        """
        self._used = {nonce: end_time for nonce, end_time in self._used.items() if end_time > now}
        code = browser_seal.read(self._keys, text)
        if code is None or code.gateway != gateway or now >= code.end_time or code.nonce in self._used:
            raise Unauthenticated("This link was used or is too old: `pawl console` makes another one.")
        self._used[code.nonce] = code.end_time
        return code.key
