"""Polls one mailbox over IMAP (RFC 3501) without changing it: `python -m pawl.mailbox.poll`.

Each poll runs in its own process, which `mailboxes` kills when it times out, so that no server or message can use more
CPU time or memory than allowed. The process imports only the standard library and the parser.
"""

from __future__ import annotations

import imaplib
import json
import re
import resource
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from pawl.mailbox.mail import read_mail

MAIL_BYTES_MAX: Final = 1024 * 1024
MAILS_MAX: Final = 10
# Limit on the total bytes of a poll's messages. The last message may exceed it.
MAILS_BYTES_MAX: Final = 4 * MAIL_BYTES_MAX
SESSION_BYTES_MAX: Final = 8 * MAIL_BYTES_MAX
LINE_BYTES_MAX: Final = 64 * 1024
# Number of UIDs per search. The response is one line, which must be shorter than LINE_BYTES_MAX.
RANGE_UIDS: Final = 5000
# Maximum number of ranges per poll. The last search covers all remaining UIDs.
_RANGES_MAX: Final = 100
# CPU time for each message, and for everything before the first message.
CPU_SECONDS: Final = 5
MEMORY_BYTES_MAX: Final = 1024 * 1024 * 1024
_SILENT_SECONDS: Final = 10.0
_UIDS_END: Final = 2**32
_UID: Final = re.compile(rb"\bUID ([0-9]{1,10})\b")
_SIZE: Final = re.compile(rb"\bRFC822\.SIZE ([0-9]{1,12})\b")
# RFC 5530: the message was deleted. After any other refusal, the message may be available at the next poll.
_GONE: Final = re.compile(rb"\[(?:EXPUNGEISSUED|NONEXISTENT)\]", re.IGNORECASE)


class Unreadable(Exception):
    """Raised when the mailbox cannot be read. The message contains the reason but does not quote the server."""


class _Session(imaplib.IMAP4):
    """A connection to the first address that accepts one. It is aborted if the server sends too much."""

    def __init__(self, host: str, port: int, addresses: list[str], *, plaintext: bool) -> None:
        self._addresses = addresses
        self._plaintext = plaintext
        self._bytes_left = SESSION_BYTES_MAX
        super().__init__(host, port, _SILENT_SECONDS)

    def _create_socket(self, timeout: float | None) -> socket.socket:
        error: OSError = ConnectionError()
        for address in self._addresses:
            try:
                connection = socket.create_connection((address, self.port), timeout)
            except OSError as refused:
                error = refused
                continue
            return (
                connection
                if self._plaintext
                else ssl.create_default_context().wrap_socket(connection, server_hostname=self.host)
            )
        raise error

    def read(self, size: int) -> bytes:
        """Read a literal after checking its announced size."""
        self._take(size)
        return super().read(size)

    def readline(self) -> bytes:
        line = super().readline()
        if len(line) > LINE_BYTES_MAX:
            raise self.abort("a line is too long")
        self._take(len(line))
        return line

    def _take(self, size: int) -> None:
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise self.abort("too much was sent")


def poll(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a folder's highest UID and, if its UIDVALIDITY has not changed, the first messages after the position.

    Each message is yielded twice, first without `data`. If parsing a message kills the process, the last line therefore
    identifies that message.

    Raises:
        Unreadable: The server refuses the login or a command.
        OSError, IMAP4.error, ValueError, IndexError: The server is unavailable or violates the protocol.
    """
    session = _Session(asked["host"], asked["port"], asked["addresses"], plaintext=asked["plaintext"])
    try:
        _log_in(session, asked["username"], asked["password"])
        if session.select(f'"{asked["folder"]}"', readonly=True)[0] != "OK":
            raise Unreadable(f"has no folder {asked['folder']}")
        validity, next_uid = (int(session.response(name)[1][-1] or 0) for name in ("UIDVALIDITY", "UIDNEXT"))
        if not (0 < validity < _UIDS_END and 0 < next_uid < _UIDS_END):
            raise ValueError
        yield {"uid_validity": validity, "last_uid": next_uid - 1}
        uids = _uids(session, asked["uid"], next_uid) if validity == asked["uid_validity"] else iter(())
        uid, mails, taken = next(uids, None), 0, 0
        while uid is not None and mails < MAILS_MAX and taken <= MAILS_BYTES_MAX:
            if (fetched := _fetch(session, uid)) is not None:
                yield {"uid": uid}
                _limit_cpu()
                yield {"uid": uid, "data": read_mail(*fetched, **asked["counts"])}
                mails, taken = mails + 1, taken + len(fetched[0])
            uid = next(uids, None)
        yield {"has_more": uid is not None}
    finally:
        session.shutdown()


def _log_in(session: _Session, username: str, password: str) -> None:
    try:
        if "AUTH=PLAIN" in session.capabilities:
            session.authenticate("PLAIN", lambda _: f"\0{username}\0{password}".encode())
        else:  # imaplib quotes passwords only.
            session.login('"' + username.replace("\\", r"\\").replace('"', r"\"") + '"', password)
    except imaplib.IMAP4.abort:
        raise
    except imaplib.IMAP4.error:
        raise Unreadable("refuses the user name or password") from None


def _uids(session: _Session, after: int, next_uid: int) -> Iterator[int]:
    for _ in range(_RANGES_MAX):
        if next_uid - after <= RANGE_UIDS:
            break
        yield from _found(session, after, after + RANGE_UIDS)
        after += RANGE_UIDS
    yield from _found(session, after, None)


def _found(session: _Session, after: int, last: int | None) -> list[int]:
    status, lines = session.uid("SEARCH", f"UID {after + 1}:{last or '*'}")
    if status != "OK":
        raise Unreadable("cannot be searched")
    listed = {int(uid) for line in lines if isinstance(line, bytes) for uid in re.findall(rb"[0-9]{1,10}", line)}
    # A range that ends with `*` always includes the last message.
    return sorted(uid for uid in listed if after < uid < (last + 1 if last else _UIDS_END))


def _fetch(session: _Session, uid: int) -> tuple[bytes, bool] | None:
    """Return a message's bytes and whether they are only its first part, or None if the message was deleted."""
    status, answer = session.uid("FETCH", str(uid), f"(UID RFC822.SIZE BODY.PEEK[]<0.{MAIL_BYTES_MAX}>)")
    if status != "OK" and not _GONE.match(answer[-1]):
        raise Unreadable(f"refuses to send message {uid}")
    for item in answer:
        if isinstance(item, tuple) and (found := _UID.search(item[0])) and int(found[1]) == uid:
            size, content = _SIZE.search(item[0]), item[1][:MAIL_BYTES_MAX]
            return content, size is None or int(size[1]) > len(content)
    return None


def _limit_cpu() -> None:
    _limit(resource.RLIMIT_CPU, int(time.process_time()) + CPU_SECONDS)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main() -> None:
    """Poll the mailbox described on standard input, and write each result as a line to standard output."""
    _limit(resource.RLIMIT_AS, MEMORY_BYTES_MAX)
    _limit_cpu()
    error = ""
    try:
        for line in poll(json.load(sys.stdin)):
            print(json.dumps(line), flush=True)  # noqa: T201  # for the process that started it
    except Unreadable as refused:
        error = str(refused)
    except ssl.SSLError as failed:
        error = f"cannot be trusted over TLS: {failed.reason or 'no TLS'}"
    except TimeoutError:
        error = "did not answer in time"
    except OSError as failed:
        error = f"cannot be reached: {failed.strerror or 'connection closed'}"
    except (imaplib.IMAP4.error, ValueError, IndexError, MemoryError):
        error = "does not speak valid IMAP"
    if error:
        print(json.dumps({"error": error}))  # noqa: T201


if __name__ == "__main__":
    main()
