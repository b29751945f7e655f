"""A scripted mail server for tests that keeps accepted mails."""

from __future__ import annotations

import asyncio
import email
import email.policy
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from email.message import EmailMessage
from typing import Any

from aiosmtpd.smtp import SMTP, Envelope

OK = "250 OK"
_CODE = re.compile(r"pawl notify confirm (\S+) (\d{8})")


class Postbox:
    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []
        self.recipient = OK
        self.data: Iterator[str] = iter(())
        self.breaks = False
        self.falls_silent = False
        # Commands wait until this is set
        self.held: asyncio.Event | None = None

    async def handle_RCPT(self, _server: Any, _session: Any, envelope: Envelope, address: str, _options: Any) -> str:
        if address.startswith("nobody"):
            return "550 no such user"
        if self.recipient == OK:
            envelope.rcpt_tos.append(address)
        return self.recipient

    async def handle_DATA(self, server: SMTP, _session: Any, envelope: Envelope) -> str:
        self.envelopes.append(envelope)
        if self.breaks:
            assert isinstance(server.transport, asyncio.WriteTransport)
            server.transport.abort()
        if self.held is not None:
            await self.held.wait()
        return next(self.data, OK)

    async def handle_QUIT(self, _server: Any, _session: Any, _envelope: Envelope) -> str:
        if self.falls_silent:
            await asyncio.Event().wait()
        return "221 Bye"

    def messages(self) -> list[EmailMessage]:
        return [_read(envelope) for envelope in self.envelopes]

    def texts(self) -> list[str]:
        return [text_of(message) for message in self.messages()]

    def codes(self) -> list[str]:
        return [match[2] for text in self.texts() if (match := _CODE.search(text))]


def text_of(message: EmailMessage) -> str:
    body = message.get_body(("plain",))
    assert body is not None
    return str(body.get_content())


def _read(envelope: Envelope) -> EmailMessage:
    assert isinstance(envelope.content, bytes)
    message = email.message_from_bytes(envelope.content, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    return message


@asynccontextmanager
async def mail_server() -> AsyncIterator[tuple[Postbox, int]]:
    postbox = Postbox()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(postbox, hostname="mail.example.org", loop=loop), "127.0.0.1", 0)
    async with server:
        yield postbox, server.sockets[0].getsockname()[1]
