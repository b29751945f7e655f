"""An IMAP server with one folder. It implements the part of RFC 3501 for reading mail.

Its responses were compared with Dovecot's.
"""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
from types import TracebackType
from typing import Final, Self

_FETCH: Final = re.compile(r"UID FETCH (\d+) \(UID RFC822\.SIZE BODY\.PEEK\[\]<0\.(\d+)>\)", re.IGNORECASE)
_SEARCH: Final = re.compile(r"UID SEARCH UID (\d+):(\d+|\*)", re.IGNORECASE)
_STRING: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|([^\s"\\(){%*]+)')
_EXAMINE: Final = re.compile(r'EXAMINE "?([^"]*)"?', re.IGNORECASE)


class ImapServer:
    """A server on a free port. A context manager.

    `says` overrides responses to commands, by their first words. The server does not respond while `answers` is not
    set.
    """

    def __init__(self, *, tls: ssl.SSLContext | None = None, username: str = "ann", password: str = "secret") -> None:
        self._tls = tls
        self._username = username
        self._password = password
        self.uid_validity = 7
        self.mails: dict[int, bytes] = {}
        self.says: dict[str, bytes] = {}
        self.sessions = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def add(self, mail: bytes | str) -> int:
        raw = mail.encode() if isinstance(mail, str) else mail
        uid = max(self.mails, default=0) + 1
        self.mails[uid] = re.sub(rb"\r?\n", b"\r\n", raw)
        return uid

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sessions += 1
        try:
            await self.answers.wait()
            writer.write(self.says.get("greeting", b"* OK ready\r\n"))
            while line := await reader.readline():
                tag, _, command = line.decode().strip().partition(" ")
                answer = await self._answer(command, reader, writer)
                writer.write(answer.replace(b"TAG", tag.encode()))
                await writer.drain()
                if command.upper() == "LOGOUT":
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, command: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for words, said in self.says.items():
            if command.upper().startswith(words.upper()):
                return said
        if command.upper() == "CAPABILITY":
            return b"* CAPABILITY IMAP4rev1 AUTH=PLAIN\r\nTAG OK done\r\n"
        if command.upper() == "AUTHENTICATE PLAIN":
            writer.write(b"+ \r\n")
            shown = base64.b64decode(await reader.readline()).decode().split("\0")[1:]
            return self._logged_in(shown == [self._username, self._password])
        if command.upper().startswith("LOGIN"):
            shown = [re.sub(r"\\(.)", r"\1", quoted) or atom for quoted, atom in _STRING.findall(command[6:])]
            return self._logged_in(shown == [self._username, self._password])
        if (match := _EXAMINE.fullmatch(command)) is not None:
            return self._opened(match[1])
        if (match := _SEARCH.fullmatch(command)) is not None:
            # A range that ends with `*` always includes the last e-mail.
            last = max(self.mails, default=0)
            end = last if match[2] == "*" else int(match[2])
            found = [uid for uid in self.mails if int(match[1]) <= uid <= end or (match[2] == "*" and uid == last)]
            return f"* SEARCH {' '.join(map(str, sorted(found)))}".rstrip().encode() + b"\r\nTAG OK done\r\n"
        if (match := _FETCH.fullmatch(command)) is not None:
            return self._fetched(int(match[1]), int(match[2]))
        return b"TAG OK bye\r\n" if command.upper() == "LOGOUT" else b"TAG BAD what?\r\n"

    def _logged_in(self, is_good: bool) -> bytes:
        return b"TAG OK in\r\n" if is_good else b"TAG NO [AUTHENTICATIONFAILED] failed\r\n"

    def _opened(self, folder: str) -> bytes:
        if folder != "INBOX":
            return b"TAG NO no such folder\r\n"
        following = max(self.mails, default=0) + 1
        return (
            f"* {len(self.mails)} EXISTS\r\n* OK [UIDVALIDITY {self.uid_validity}] valid\r\n"
            f"* OK [UIDNEXT {following}] next\r\nTAG OK [READ-ONLY] done\r\n"
        ).encode()

    def _fetched(self, uid: int, most: int) -> bytes:
        mail = self.mails.get(uid)
        if mail is None:
            return b"TAG OK done\r\n"
        part = mail[:most]
        about = f"* {uid} FETCH (UID {uid} RFC822.SIZE {len(mail)} BODY[]<0> {{{len(part)}}}\r\n".encode()
        return about + part + b")\r\nTAG OK done\r\n"
