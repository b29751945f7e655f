"""Mailboxes over IMAP (RFC 3501), by imaplib in threads: it waits, and what servers send is bounded here."""

from __future__ import annotations

import asyncio
import imaplib
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Protocol, Self

from pawl.chassis.egress_addresses import Address
from pawl.chassis.egress_rules import Target
from pawl.chassis.ids import StoreId
from pawl.chassis.mailbox_place import MailboxPlace
from pawl.chassis.shares import Places
from pawl.chassis.tasks import shield
from pawl.errors import MailboxUnreachable
from pawl.tool_registry.app.mailboxes.mailboxes import RawMail, RawMails, Wanted
from pawl.tool_registry.domain.mail import MAIL_BYTES_MAX

SESSIONS_MAX: Final = 8
"""Mailboxes that are read at the same time, of which a store has its share."""
SESSION_SECONDS: Final = 20.0
"""The time for a look, from the connection on: a server that hangs holds its place no longer."""
_CONNECT_SECONDS: Final = 5.0
_MAILS_BYTES_MAX: Final = 4 * MAIL_BYTES_MAX
"""Of a session; the last mail may be beyond it."""
_SESSION_BYTES_MAX: Final = 8 * MAIL_BYTES_MAX
_LINE_BYTES_MAX: Final = 64 * 1024
_PIECE_BYTES: Final = 64 * 1024
_UID: Final = re.compile(rb"\bUID ([0-9]{1,10})\b")
_SIZE: Final = re.compile(rb"\bRFC822\.SIZE ([0-9]{1,12})\b")
_GONE: Final = re.compile(rb"\[(?:EXPUNGEISSUED|NONEXISTENT)\]", re.IGNORECASE)
"""RFC 5530. For another reason not to give a mail there may be none the next time."""
_UIDS_END: Final = 2**32
_RANGE_UIDS: Final = 5000
"""A search for more of them could be answered by a line that is too long."""
_RANGES_MAX: Final = 100
"""Behind so many empty ones all that follow are asked for: a session has its time."""
_NUMBER: Final = re.compile(rb"[0-9]{1,10}")


class Locate(Protocol):
    """Judges where a connection is to go."""

    async def __call__(self, store_id: StoreId, url: str) -> tuple[Target, Sequence[Address]]:
        """Return the target of a URL, and its addresses, one of which to connect to.

        Raises:
            EgressRefused: it must not be reached, or no password sent to it.
        """
        ...


class ImapMailboxes:
    """The MailboxReader port. A context manager."""

    def __init__(self, locate: Locate, tls: ssl.SSLContext | None = None) -> None:
        self._locate = locate
        self._tls = tls or ssl.create_default_context()
        self._threads = ThreadPoolExecutor(SESSIONS_MAX, thread_name_prefix="imap")
        self._places = Places(SESSIONS_MAX)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, store_id: StoreId, place: MailboxPlace, password: str, wanted: Wanted) -> RawMails:
        scheme = "http" if place.plaintext else "https"
        host = f"[{place.host}]" if ":" in place.host else place.host
        target, addresses = await self._locate(store_id, f"{scheme}://{host}:{place.port}/")
        connect = partial(_connect, target, addresses, None if place.plaintext else self._tls)
        await self._places.enter(store_id)
        session = partial(_read, connect, place, password, wanted)
        # It ends by itself, and its place is free no sooner.
        work = asyncio.get_running_loop().run_in_executor(self._threads, session)
        self._places.leave_after(work, store_id)
        return await shield(work)


def _connect(target: Target, addresses: Sequence[Address], tls: ssl.SSLContext | None, until: float) -> socket.socket:
    """Return a connection to the first address that takes one before that time."""
    error: OSError = ConnectionError()
    for address in addresses:
        seconds = min(_CONNECT_SECONDS, _seconds_left(until))
        try:
            plain = socket.create_connection((str(address), target.port), seconds)
        except OSError as refused:
            error = refused
            continue
        try:
            plain.settimeout(min(_CONNECT_SECONDS, _seconds_left(until)))
            return tls.wrap_socket(plain, server_hostname=target.host) if tls else plain
        except BaseException:
            plain.close()
            raise
    raise error


def _seconds_left(until: float) -> float:
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


class _Session(imaplib.IMAP4):
    """A session that ends in time, and reads no more than is asked for."""

    def __init__(self, connect: Callable[[float], socket.socket]) -> None:
        self._connect_to = connect
        self._until = time.monotonic() + SESSION_SECONDS
        self._left = _SESSION_BYTES_MAX
        super().__init__()

    def open(self, host: str = "", port: int = 0, timeout: float | None = None) -> None:
        """Connect."""
        self.host, self.port = host, port
        self.sock = self._connect_to(self._until)
        self._stream = self.sock.makefile("rb")

    def shutdown(self) -> None:
        """Close the connection."""
        self._stream.close()
        self.sock.close()

    def read(self, size: int) -> bytes:
        """Read a literal."""
        pieces: list[bytes] = []
        while size > 0:
            piece = self._piece(min(size, _PIECE_BYTES))
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def readline(self) -> bytes:
        """Read a line."""
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self._piece_of_line()
            if len(line) > _LINE_BYTES_MAX:
                raise self.error("a line is too long")
        return bytes(line)

    def _piece(self, most: int) -> bytes:
        self._set_time()
        return self._taken(self._stream.read1(most))

    def _piece_of_line(self) -> bytes:
        """Return what is there of a line."""
        self._set_time()
        there = self._stream.peek(1)
        end = there.find(b"\n")
        return self._taken(self._stream.read1(min(len(there) if end < 0 else end + 1, _PIECE_BYTES) or 1))

    def _set_time(self) -> None:
        self.sock.settimeout(_seconds_left(self._until))

    def _taken(self, piece: bytes) -> bytes:
        self._left -= len(piece)
        if not piece or self._left < 0:
            raise self.abort("the connection ended, or too much came")
        return piece


def _read(connect: Callable[[float], socket.socket], place: MailboxPlace, password: str, wanted: Wanted) -> RawMails:
    """Return mails after one.

    Raises:
        MailboxUnreachable: the server is not there, or does not answer as it should.
    """
    where = f"{place.host}:{place.port}"
    session: _Session | None = None
    try:
        session = _Session(connect)
        _log_in(session, place.username, password)
        return _mails(session, place.folder, wanted)
    except ssl.SSLError as error:
        raise MailboxUnreachable(f"{where} speaks no TLS that can be trusted: {error.reason or 'no TLS'}") from None
    except TimeoutError:
        raise MailboxUnreachable(f"{where} did not answer in time") from None
    except OSError as error:
        raise MailboxUnreachable(f"{where} cannot be connected to: {error.strerror or 'it ended'}") from None
    except _Refused as refused:
        raise MailboxUnreachable(f"{where} {refused}") from None
    except (imaplib.IMAP4.error, ValueError, IndexError, EOFError):
        # What servers say may repeat what they were sent.
        raise MailboxUnreachable(f"{where} does not answer as an IMAP server should") from None
    finally:
        if session is not None:
            session.shutdown()


class _Refused(Exception):
    """The server says no."""


def _log_in(session: _Session, username: str, password: str) -> None:
    try:
        if "AUTH=PLAIN" in session.capabilities:
            session.authenticate("PLAIN", lambda _: f"\0{username}\0{password}".encode())
        else:
            session.login(_quoted(username), password)
    except imaplib.IMAP4.abort:
        raise
    except imaplib.IMAP4.error:
        raise _Refused("does not let the user in with this password") from None


def _quoted(text: str) -> str:
    """Return a text as a string of IMAP: imaplib quotes passwords only."""
    return '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'


def _mails(session: _Session, folder: str, wanted: Wanted) -> RawMails:
    if session.select(f'"{folder}"', readonly=True)[0] != "OK":
        raise _Refused(f"has no folder {folder}")
    validity, next_uid = _told(session, "UIDVALIDITY"), _told(session, "UIDNEXT")
    after_uid, mails_max = wanted.after_uid, wanted.mails_max
    if not mails_max or validity != wanted.uid_validity:
        return RawMails(uid_validity=validity, last_uid=next_uid - 1)
    mails, last_listed = _first_mails(session, wanted, next_uid)
    return RawMails(
        uid_validity=validity,
        last_uid=max(next_uid - 1, after_uid),
        mails=tuple(mails),
        # Without a mail the next look would find the same: it is made when it is time.
        has_more=bool(mails) and mails[-1].uid < max(last_listed, next_uid - 1),
    )


def _first_mails(session: _Session, wanted: Wanted, next_uid: int) -> tuple[Sequence[RawMail], int]:
    """Return the mails of the first range of which any can be fetched, and the last UID that is listed there.

    If the session ends while they come, those that came whole are returned.
    """
    for uids in _ranges(session, wanted.after_uid, next_uid):
        mails: list[RawMail] = []
        taken = 0
        for uid in uids:
            if taken > _MAILS_BYTES_MAX or len(mails) == wanted.mails_max:
                break
            try:
                mail = _mail(session, uid)
            except (OSError, imaplib.IMAP4.error, _Refused):
                if not mails:
                    raise
                break  # No time, no connection, or not this one: the next look goes on behind those that came whole.
            if mail is not None:
                taken += len(mail.content)
                mails.append(mail)
        if mails:
            return mails, uids[-1]
    return (), 0


def _ranges(session: _Session, after_uid: int, next_uid: int) -> Iterator[Sequence[int]]:
    """Yield the UIDs of mails after one, in order, and those of many mails a range at a time."""
    first = after_uid + 1
    for _ in range(_RANGES_MAX):
        if next_uid - first <= _RANGE_UIDS:
            break
        yield _found(session, after_uid, f"{first}:{first + _RANGE_UIDS - 1}")
        first += _RANGE_UIDS
    yield _found(session, after_uid, f"{first}:*")


def _found(session: _Session, after_uid: int, uids: str) -> list[int]:
    found = session.uid("SEARCH", f"UID {uids}")
    if found[0] != "OK":
        raise _Refused("cannot be searched")
    listed = {int(each) for line in found[1] if isinstance(line, bytes) for each in _NUMBER.findall(line)}
    return sorted(uid for uid in listed if after_uid < uid < _UIDS_END)


def _told(session: _Session, name: str) -> int:
    """Return a number that a server tells when a folder is opened."""
    number = int(session.response(name)[1][-1] or 0)
    if not 0 < number < _UIDS_END:
        raise ValueError(name)
    return number


def _mail(session: _Session, uid: int) -> RawMail | None:
    """Return a mail, or its beginning; None if it is gone."""
    what = f"(UID RFC822.SIZE BODY.PEEK[]<0.{MAIL_BYTES_MAX}>)"
    said, answer = session.uid("FETCH", str(uid), what)
    if said != "OK" and not _GONE.match(answer[-1]):
        raise _Refused(f"does not give the mail {uid}")
    for item in answer:
        if not isinstance(item, tuple):
            continue
        about, content = item[0], item[1][:MAIL_BYTES_MAX]
        told, size = _UID.search(about), _SIZE.search(about)
        if told and int(told[1]) == uid:
            return RawMail(uid=uid, content=content, is_cut=size is None or int(size[1]) > len(content))
    return None
