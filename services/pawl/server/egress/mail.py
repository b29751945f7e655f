"""Sends mail through the SMTP server from the settings."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.headerregistry import BaseHeader, HeaderRegistry, UnstructuredHeader
from email.message import EmailMessage
from email.policy import SMTP, Policy
from typing import Annotated, Final
from urllib.parse import unquote, urlsplit

import aiosmtplib
from pydantic import AfterValidator, SecretStr

_SCHEMES: Final = {"smtp": 25, "smtp+starttls": 587, "smtps": 465}
# Start of an encoded word (RFC 2047). Headers with untrusted text must not contain one: the email package decodes it,
# including line breaks, and writes the result.
ENCODED: Final = "=?"
_GOODBYE_SECONDS: Final = 1.0
_SENDER: Final = re.compile(r"[^\s<>@\"(),:;\\]+@[A-Za-z0-9.-]+")


class _MessageIds(UnstructuredHeader, BaseHeader):
    """A header with one message id per line. The library would encode longer lines, which mail programs cannot read."""

    def fold(self, *, policy: Policy) -> str:
        return f"{self.name}: " + f"{policy.linesep} ".join(str(self).split()) + policy.linesep


_headers = HeaderRegistry()
for _name in ("in-reply-to", "references"):
    _headers.map_to_type(_name, _MessageIds)
# The policy of outgoing messages: any server can transport them.
POLICY: Final = SMTP.clone(cte_type="7bit", header_factory=_headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmtpServer:
    host: str
    port: int
    username: str | None
    password: str | None
    use_tls: bool
    # None: use it if the server offers it.
    start_tls: bool | None

    async def send(
        self, message: EmailMessage | bytes, *, sender: str | None = None, recipients: Sequence[str], seconds: float
    ) -> Mapping[str, object]:
        """Send a message over a new connection.

        If some recipients were refused and others were accepted, return the refused ones. Takes at most `seconds`.
        Errors are ignored once the server has accepted the message. `sender` defaults to the message's sender.

        Raises:
            aiosmtplib.SMTPException: The message was refused, or the connection broke, perhaps after it was accepted.
            TimeoutError: Sending took too long, and the server may have accepted the message.
        """
        client = aiosmtplib.SMTP(
            hostname=self.host,
            port=self.port,
            username=self.username,
            password=self.password,
            use_tls=self.use_tls,
            start_tls=self.start_tls,
            timeout=seconds,
        )
        try:
            async with asyncio.timeout(seconds):
                await client.connect()
                if isinstance(message, bytes):
                    refused, _ = await client.sendmail(sender or "", list(recipients), message)
                else:
                    refused, _ = await client.send_message(message, sender=sender, recipients=list(recipients))
            with suppress(aiosmtplib.SMTPException, OSError):
                await client.quit(timeout=_GOODBYE_SECONDS)
            return refused
        finally:
            client.close()


def read_smtp_url(url: str) -> SmtpServer:
    """Parse `smtp://`, `smtp+starttls://` or `smtps://[user:password@]host[:port]`.

    Raises:
        ValueError: The URL is malformed. The message does not contain the URL.
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


def _check_smtp_url(value: SecretStr | None) -> SecretStr | None:
    if value is not None:
        read_smtp_url(value.get_secret_value())
    return value


def _check_sender(value: str) -> str:
    if not _SENDER.fullmatch(value):
        raise ValueError("must be a bare address, for example pawl@example.com")
    return value


# The URL of an SMTP server, checked with `read_smtp_url`; None if it is not set.
SmtpUrl = Annotated[SecretStr | None, AfterValidator(_check_smtp_url)]

# A bare sender address.
SenderAddress = Annotated[str, AfterValidator(_check_sender)]
