"""Polls of a mailbox over real connections.

E-mails are read in order and within limits, whatever the server responds.
"""

from __future__ import annotations

import asyncio
import io
import json
import resource
import ssl
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import trustme

from pawl.mailbox import mailboxes
from pawl.mailbox import poll as poll_process
from pawl.mailbox.poll import CPU_SECONDS, LINE_BYTES_MAX, MAIL_BYTES_MAX, MEMORY_BYTES_MAX
from tests.fakes.imap_server import ImapServer
from tests.tables import for_each

MAIL = "From: Ann <ann@example.com>\nSubject: hi {}\n\nhello"
BLAMED = {"uid": 2, "data": {"refusal": "it cannot be parsed"}}


def asked_of(server: ImapServer, **fields: Any) -> dict[str, Any]:
    return {
        "host": "127.0.0.1",
        "port": server.port,
        "addresses": ["127.0.0.1"],
        "plaintext": True,
        "username": "ann",
        "password": "secret",
        "folder": "INBOX",
        "uid_validity": 7,
        "uid": 0,
        "counts": {"own": "ann", "authserv_id": "", "senders": ["@example.com"]},
        **fields,
    }


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits that polls in this process would set."""
    found = list[tuple[int, int]]()
    monkeypatch.setattr(poll_process, "_limit", lambda kind, value: found.append((kind, value)))
    return found


def polled(asked: dict[str, Any]) -> list[dict[str, Any]]:
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(json.dumps(asked)))
        patch.setattr("sys.stdout", output)
        poll_process.main()
    return [json.loads(line) for line in output.getvalue().splitlines()]


async def poll(server: ImapServer, uid: int = 0, **fields: Any) -> tuple[list[int], str, bool]:
    lines = await asyncio.to_thread(polled, asked_of(server, uid=uid, **fields))
    uids = [line["uid"] for line in lines if "data" in line]
    return uids, lines[-1].get("error", ""), lines[-1].get("has_more", False)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ImapServer]:
    async with ImapServer() as server:
        yield server


async def test_emails_after_a_position_are_read_in_order(server: ImapServer) -> None:
    assert await poll(server) == ([], "", False)
    for number in range(13):
        server.add(MAIL.format(number))
    del server.mails[3]
    for uid, uids in ((1, [2, *range(4, 13)]), (12, [13]), (13, [])):
        assert await poll(server, uid) == (uids, "", uid == 1)
    assert await poll(server, uid_validity=6) == ([], "", False), "another UIDVALIDITY numbers other mails"
    server.mails = {1: MAIL.encode() + b"a" * (2 * MAIL_BYTES_MAX)}
    assert await poll(server) == ([1], "", False)


async def test_only_trusted_tls_is_accepted(
    server: ImapServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, untrusted = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    async with ImapServer(tls=context) as safe:
        safe.add(MAIL)
        for trusted, host, is_read in (
            (authority, "localhost", True),
            (authority, "127.0.0.1", False),
            (untrusted, "localhost", False),
        ):
            trusted.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
            uids, error, _ = await poll(safe, plaintext=False, host=host)
            assert (uids == [1], "TLS" in error) == (is_read, not is_read), error
    assert "TLS" in (await poll(server, plaintext=False))[1]


async def test_errors_never_contain_the_password(server: ImapServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in (b"", b"* CAPABILITY IMAP4rev1\r\nTAG OK done\r\n"):
        if capability:
            server.says["CAPABILITY"] = capability
        _, error, _ = await poll(server, password="wrong-pass")
        assert error == "refuses the user name or password"
    assert (await poll(server, folder="Spam"))[1] == "has no folder Spam"
    for username in ("EXAMPLE\\ann", 'ann"(1)', "{3}"):
        async with ImapServer(username=username) as other:
            other.says["CAPABILITY"] = server.says["CAPABILITY"]
            assert (await poll(other, username=username))[1] == "", username
    monkeypatch.setattr(mailboxes, "POLL_SECONDS_MAX", 1.0)
    server.says["greeting"] = b""
    assert await mailboxes.run_poll(asked_of(server)) == [{"error": "did not answer in time"}]


async def test_a_server_that_violates_the_protocol_is_unreadable(server: ImapServer) -> None:
    server.add(MAIL)
    for words, response in (
        ("greeting", b"220 smtp.example ESMTP\r\n"),
        ("greeting", b"* BYE busy\r\n"),
        ("CAPABILITY", b"* CAPABILITY NOTHING\r\nTAG OK\r\n"),
        ("EXAMINE", b"TAG OK done\r\n"),
        ("EXAMINE", b"* OK [UIDVALIDITY 0] x\r\n* OK [UIDNEXT 1] x\r\nTAG OK done\r\n"),
        ("EXAMINE", b"* OK [UIDVALIDITY x] x\r\n* OK [UIDNEXT 1] x\r\nTAG OK done\r\n"),
        ("UID SEARCH", b"TAG NO never\r\n"),
        ("UID SEARCH", b"* SEARCH " + b"1 " * 1_000_000 + b"\r\nTAG OK done\r\n"),
        ("UID SEARCH", (b"* SEARCH" + b" 1" * 30_000 + b"\r\n") * 200),
        ("UID FETCH", b"* 1 FETCH (UID 1 BODY[]<0> {4000000000}\r\n" + b"a" * 9_000_000),
        ("CAPABILITY", b"* CAPABILITY AUTH=PLAIN IMAP4rev1 " + b"x" * LINE_BYTES_MAX + b"\r\nTAG OK done\r\n"),
        ("UID FETCH", b"* 1 FETCH (UID 1 BODY[]<0> {9000000}\r\n" + b"a" * 9_000_000 + b")\r\nTAG OK done\r\n"),
        (
            "UID FETCH",
            (b"* 1 FETCH (UID 1 BODY[]<0> {3000000}\r\n" + b"a" * 3_000_000 + b")\r\n") * 3 + b"TAG OK done\r\n",
        ),
        ("UID FETCH", b"* 1 FETCH (UID 1 BODY[]<0> {" + b"9" * 50_000 + b"}\r\n"),
        ("UID FETCH", b"\xff\xfe\x00{-1}\r\n"),
    ):
        server.says = {words: response}
        assert (await poll(server))[1], response[:40]


async def test_a_poll_returns_a_limited_number_of_messages(server: ImapServer) -> None:
    server.mails = dict.fromkeys(range(1, 11), MAIL.encode() + b"a" * MAIL_BYTES_MAX)
    assert [await poll(server, uid) for uid in (0, 5)] == [([1, 2, 3, 4, 5], "", True), ([6, 7, 8, 9, 10], "", False)]


async def test_a_backlog_of_any_size_is_read(server: ImapServer) -> None:
    server.mails = dict.fromkeys(range(1, 200_001), MAIL.encode())
    assert await poll(server, 7) == (list(range(8, 18)), "", True)
    assert await poll(server, 199_999) == ([200_000], "", False)
    uids = [1, 4_999, 5_000, 5_001, 9_999, 10_001, 600_001]
    server.mails = dict.fromkeys(uids, MAIL.encode())
    assert [await poll(server, uid) for uid in (0, 1)] == [(uids, "", False), (uids[1:], "", False)]


async def test_a_deleted_email_is_skipped_but_an_unavailable_one_is_not(server: ImapServer) -> None:
    for number in range(3):
        server.add(MAIL.format(number))
    for response in (
        b"TAG OK done\r\n",
        b"* 2 FETCH (UID 1 RFC822.SIZE 3 BODY[]<0> {3}\r\nabc)\r\nTAG OK done\r\n",
        b"* 2 FETCH (UID 2 BODY[]<0> NIL)\r\nTAG OK done\r\n",
        b"TAG NO [EXPUNGEISSUED] some are gone\r\n",
        b"TAG NO [nonexistent] gone\r\n",
    ):
        server.says = {"UID FETCH 2 ": response}
        assert await poll(server) == ([1, 3], "", False), response
    server.mails = dict.fromkeys(range(1, 14), MAIL.encode())
    server.says = {f"UID FETCH {uid} ": b"TAG OK done\r\n" for uid in range(1, 13)}
    assert await poll(server) == ([13], "", False), "however many were deleted"
    for response in (b"NO [UNAVAILABLE] later", b"NO not now"):
        server.says = {"UID FETCH 2 ": b"TAG " + response + b"\r\n"}
        assert await poll(server) == ([1], "refuses to send message 2", False), response


async def test_memory_and_the_cpu_time_of_each_email_are_limited(
    server: ImapServer, limits: list[tuple[int, int]]
) -> None:
    for _ in range(2):
        server.add(MAIL)
    await poll(server)
    assert limits[0] == (resource.RLIMIT_AS, MEMORY_BYTES_MAX)
    assert [kind for kind, _ in limits[1:]] == [resource.RLIMIT_CPU] * 3
    assert all(value <= time.process_time() + CPU_SECONDS for _, value in limits[1:])


async def test_an_email_that_breaks_the_parser_does_not_block_others(server: ImapServer) -> None:
    deep = f"Content-Type: text/plain {'(' * 3000}\n\nx"
    for mail in (MAIL, f"From: eve@evil.example\n{deep}", "Content-Type: name;charset*0*\n\nx", MAIL):
        server.add(mail)
    assert await poll(server) == ([1, 2, 3, 4], "", False)


@for_each(
    ("end", "last"),
    [
        ("kill -SEGV $$", BLAMED),
        ("kill -XCPU $$", {"uid": 2, "data": {"refusal": "parsing it takes too long"}}),
        ("exit 1", BLAMED),
        ('printf \'{"uid": 2, "da\'; kill -KILL $$', BLAMED),
        ("kill -TERM $$", {"error": "cannot be read: the poll process ended with status -15"}),
    ],
)
async def test_a_reader_crash_does_not_lose_earlier_emails(
    end: str, last: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the process was stopped from outside, no e-mail is blamed."""
    lines: list[dict[str, Any]] = [{"uid": 1}, {"uid": 1, "data": {"text": "hello"}}, {"uid": 2}]
    program = tmp_path / "look"
    shown = "".join(f"echo '{json.dumps(line)}'\n" for line in lines)
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/asked\n{shown}{end}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    assert await mailboxes.run_poll({}) == [*lines, last]
