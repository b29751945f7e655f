"""Dovecot with one mailbox, for tests: a real IMAP server."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import imaplib
import os
import pwd
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pawl.launcher.ports import free_port
from tests.poll import until

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
    """Run a server that accepts USER with PASSWORD and yield its port; skip the test if Dovecot is not installed."""
    program = shutil.which("dovecot", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("Dovecot is not installed: apt install dovecot-imapd")
    # For root, another user owns the e-mails, because Dovecot does not serve root's.
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
