"""The session of a browser: what it is given to come back with."""

from __future__ import annotations

from typing import Final

import msgspec

from pawl.errors import InvalidField

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
