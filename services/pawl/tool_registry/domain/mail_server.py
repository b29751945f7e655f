"""The server that takes mail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

_SCHEMES: Final = {"smtp": 25, "smtp+starttls": 587, "smtps": 465}


@dataclass(frozen=True, slots=True, kw_only=True)
class SmtpServer:
    """The server that takes mail."""

    host: str
    port: int
    username: str | None
    password: str | None
    use_tls: bool
    start_tls: bool | None
    """None: if the server offers it."""


def read_smtp_url(url: str) -> SmtpServer:
    """Return the server of `smtp://`, `smtp+starttls://` or `smtps://[user:password@]host[:port]`.

    Raises:
        ValueError: the URL has another form; the message does not repeat it.
    """
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES or not parts.hostname or parts.path.strip("/"):
        raise ValueError("must be smtp://, smtp+starttls:// or smtps://[user:password@]host[:port]")
    return SmtpServer(
        host=parts.hostname,
        port=parts.port or _SCHEMES[parts.scheme],
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        use_tls=parts.scheme == "smtps",
        start_tls={"smtp": None, "smtp+starttls": True, "smtps": False}[parts.scheme],
    )
