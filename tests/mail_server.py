"""Mail servers for tests: a scripted one that stores accepted mails, and Dovecot."""

from __future__ import annotations

import asyncio
import contextlib
import email
import email.policy
import grp
import imaplib
import os
import pwd
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.smtp import SMTP, Envelope

from pawl.launcher.ports import free_port
from tests.poll import until

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


USER, PASSWORD = "ann", "secret"
_SETTINGS = """
protocols = imap
listen = 127.0.0.1
base_dir = {folder}/run
state_dir = {folder}/run
log_path = {folder}/log
ssl = no
disable_plaintext_auth = no
default_internal_user = {account}
default_internal_group = {group}
default_login_user = {account}
mail_location = maildir:{folder}/mails
first_valid_uid = 1
passdb {{
  driver = static
  args = password={password}
}}
userdb {{
  driver = static
  args = uid={uid} gid={gid} home={folder}/home
}}
service imap-login {{
  chroot =
  inet_listener imap {{
    port = {port}
  }}
  inet_listener imaps {{
    port = 0
  }}
}}
service anvil {{
  chroot =
}}
"""


@asynccontextmanager
async def dovecot() -> AsyncIterator[int]:
    """Run a server that accepts USER with PASSWORD, and yield its port. Skip the test if Dovecot is not installed."""
    program = shutil.which("dovecot", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("Dovecot is not installed: apt install dovecot-imapd")
    # If this runs as root, another user owns the e-mails, because Dovecot does not serve root's e-mails.
    account = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
    with tempfile.TemporaryDirectory(prefix="pawl-dovecot-") as name:
        folder, port = Path(name), free_port()
        folder.chmod(0o755)
        for part in ("mails", "home"):
            (folder / part).mkdir()
            os.chown(folder / part, account.pw_uid, account.pw_gid)
        settings = _SETTINGS.format(
            folder=folder,
            port=port,
            password=PASSWORD,
            account=account.pw_name,
            group=grp.getgrgid(account.pw_gid).gr_name,
            uid=account.pw_uid,
            gid=account.pw_gid,
        )
        (folder / "conf").write_text(settings)
        process = await asyncio.create_subprocess_exec(program, "-F", "-c", str(folder / "conf"))

        async def listens() -> bool:
            assert process.returncode is None, (folder / "log").read_text()
            with contextlib.suppress(OSError, imaplib.IMAP4.error):
                await asyncio.to_thread(_add, port, [])
                return True
            return False

        try:
            await until(listens)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            await process.wait()


async def add(port: int, *mails: str) -> None:
    await asyncio.to_thread(_add, port, list(mails))


def _add(port: int, mails: list[str]) -> None:
    with imaplib.IMAP4("127.0.0.1", port, timeout=60) as connection:
        connection.login(USER, PASSWORD)
        for mail in mails:
            said, _ = connection.append("INBOX", "", "", mail.replace("\n", "\r\n").encode())
            assert said == "OK"
