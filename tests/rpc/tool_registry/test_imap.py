"""Mailboxes over real connections: what comes is read once and bounded, whatever the server says."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest
import pytest_asyncio
import trustme

from pawl.chassis.auth import Principal
from pawl.chassis.egress import GuardedEgress
from pawl.chassis.egress_rules import read_rules
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.mailbox_place import MailboxPlace
from pawl.chassis.tasks import end
from pawl.errors import DependencyUnavailable, InvalidField, MailboxUnreachable, TooLarge
from pawl.tool_registry.adapters.mail.imap import SESSIONS_MAX, ImapMailboxes
from pawl.tool_registry.adapters.postgres.documents import PostgresDocumentRepository
from pawl.tool_registry.adapters.process.helpers import Helpers
from pawl.tool_registry.adapters.secret_file import FileSecrets
from pawl.tool_registry.app.mailboxes.mailboxes import Mailboxes, RawMails, Wanted
from pawl.tool_registry.domain.mail import MAIL_BYTES_MAX, Senders
from tests.fakes.imap_server import ImapServer
from tests.rpc.tool_registry.registry import eventually

ACME, OTHER = StoreId("acme"), StoreId("other")
ANN = Principal(store_id=ACME, user_id=UserId("ann"))
DONE = b"\r\nTAG OK done\r\n"
MAIL = "From: Ann <ann@example.com>\nSubject: hi {}\n\nhello"


def place_of(server: ImapServer, *, plaintext: bool = True, **fields: Any) -> MailboxPlace:
    given: dict[str, Any] = {"host": "127.0.0.1", "port": server.port, "username": "ann", "folder": "INBOX"} | fields
    return MailboxPlace(plaintext=plaintext, **given)


def mailboxes_to(*servers: ImapServer, tls: ssl.SSLContext | None = None) -> ImapMailboxes:
    rules = read_rules(None, [f"{host}:{server.port}" for server in servers for host in ("127.0.0.1", "localhost")])
    return ImapMailboxes(GuardedEgress({ACME: rules, OTHER: rules}).locate, tls)


def wanted(after_uid: int = 0, mails_max: int = 10, uid_validity: int = 7) -> Wanted:
    return Wanted(uid_validity=uid_validity, after_uid=after_uid, mails_max=mails_max)


async def read(server: ImapServer, after_uid: int = 0, *, password: str = "secret", **fields: Any) -> RawMails:
    place = place_of(server, **{name: fields.pop(name) for name in ("folder", "username") if name in fields})
    async with mailboxes_to(server) as mailboxes:
        return await mailboxes.read(ACME, place, password, wanted(after_uid, **fields))


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ImapServer]:
    async with ImapServer() as server:
        yield server


async def test_mails_after_one_are_read_in_order_and_the_folder_is_left_as_it_is(server: ImapServer) -> None:
    assert (await read(server)).mails == ()
    for number in range(12):
        server.add(MAIL.format(number))
    del server.mails[3]
    found = await read(server, 1)
    assert [mail.uid for mail in found.mails] == [2, *range(4, 13)]
    assert (found.uid_validity, found.last_uid, found.has_more) == (7, 12, False)
    assert found.mails[0].content.endswith(b"hi 1\r\n\r\nhello")
    some = await read(server, 1, mails_max=2)
    assert ([mail.uid for mail in some.mails], some.has_more) == ([2, 4], True)
    assert (await read(server, 12)).mails == ()
    looked = await read(server, 0, mails_max=0)
    assert (looked.mails, looked.last_uid) == ((), 12)
    other = await read(server, 0, uid_validity=6)
    assert (other.mails, other.uid_validity, other.last_uid) == ((), 7, 12)


async def test_it_speaks_tls_that_it_trusts_and_to_nobody_else(server: ImapServer) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    trusting, mistrusting = ssl.create_default_context(), ssl.create_default_context()
    authority.configure_trust(trusting)
    stranger.configure_trust(mistrusting)
    async with ImapServer(tls=context) as safe:
        safe.add(MAIL)
        async with mailboxes_to(safe, tls=trusting) as mailboxes:
            place = place_of(safe, plaintext=False, host="localhost")
            assert len((await mailboxes.read(ACME, place, "secret", wanted())).mails) == 1
            with pytest.raises(MailboxUnreachable, match="TLS"):
                await mailboxes.read(ACME, place_of(safe, plaintext=False), "secret", wanted())
        async with mailboxes_to(safe, tls=mistrusting) as mailboxes:
            with pytest.raises(MailboxUnreachable, match="TLS"):
                await mailboxes.read(ACME, place, "secret", wanted())
    async with mailboxes_to(server, tls=trusting) as mailboxes:
        with pytest.raises(MailboxUnreachable):
            await mailboxes.read(ACME, place_of(server, plaintext=False, host="localhost"), "secret", wanted())


async def test_a_server_that_hangs_holds_up_its_own_store_and_no_other(server: ImapServer) -> None:
    """A store has half of the places at most; who gives up leaves its place when the look has ended."""
    server.add(MAIL)
    async with ImapServer() as hanging, mailboxes_to(server, hanging) as mailboxes:
        hanging.answers.clear()
        looks = [
            asyncio.create_task(mailboxes.read(ACME, place_of(hanging), "secret", wanted()))
            for _ in range(2 * SESSIONS_MAX)
        ]

        await eventually(lambda: hanging.sessions >= SESSIONS_MAX // 2)
        assert len((await mailboxes.read(OTHER, place_of(server), "secret", wanted())).mails) == 1
        await end(looks[SESSIONS_MAX:])
        assert hanging.sessions == SESSIONS_MAX // 2
        hanging.answers.set()
        assert {found.uid_validity for found in await asyncio.gather(*looks[:SESSIONS_MAX])} == {7}


async def uids(server: ImapServer, after_uid: int = 0, **more: Any) -> tuple[list[int], bool]:
    """The UIDs of the mails that are read, and whether there are more."""
    found = await read(server, after_uid, **more)
    return [mail.uid for mail in found.mails], found.has_more


async def test_very_many_or_large_mails_are_read_in_parts(server: ImapServer) -> None:
    """As after a long pause, or when somebody floods it: no list of them is in one line."""
    server.mails = dict.fromkeys(range(1, 20_001), b"From: ann@example.com\r\n\r\nhello")
    assert await uids(server, 3, mails_max=2) == ([4, 5], True)
    for uid in range(10, 18_000):
        del server.mails[uid]
    assert await uids(server, 9, mails_max=2) == ([18_000, 18_001], True)
    assert await uids(server, 19_999, mails_max=2) == ([20_000], False)
    for uid in (3, 4):
        server.says[f"UID FETCH {uid} "] = b"TAG OK done\r\n"
    for uid in range(5, 19_000):
        server.mails.pop(uid, None)
    assert await uids(server, 2, mails_max=2) == ([19_000, 19_001], True), "a range of mails that are gone is passed"
    server.mails.clear()
    server.add(b"From: ann@example.com\n\n" + b"a" * (2 * MAIL_BYTES_MAX))
    server.add(MAIL)
    large, small = (await read(server)).mails
    assert (len(large.content), large.is_cut, small.is_cut) == (MAIL_BYTES_MAX, True, False)


async def test_what_is_wrong_is_said_without_the_password(server: ImapServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in (b"", b"* CAPABILITY IMAP4rev1\r\nTAG OK done\r\n"):
        if capability:
            server.says["CAPABILITY"] = capability
        with pytest.raises(MailboxUnreachable, match="does not let the user in") as refused:
            await read(server, password="wrong-pass")
        assert "wrong-pass" not in refused.value.message
    with pytest.raises(MailboxUnreachable, match="has no folder Spam"):
        await read(server, folder="Spam")
    for username in ("ann", "EXAMPLE\\ann", "ann of sales", 'ann"(1)', "{3}"):
        async with ImapServer(username=username) as other:
            other.says["CAPABILITY"] = server.says["CAPABILITY"]
            assert (await read(other, username=username)).uid_validity == 7, username
    monkeypatch.setattr("pawl.tool_registry.adapters.mail.imap.SESSION_SECONDS", 0.2)
    for words, said in (("CAPABILITY", b"*"), ("greeting", b"")):
        server.says[words] = said
        with pytest.raises(MailboxUnreachable, match="in time"):
            await read(server)


async def test_a_server_that_lies_is_unreachable(server: ImapServer) -> None:
    server.add(MAIL)
    for words, said in (
        ("greeting", b"220 smtp.example ESMTP\r\n"),
        ("greeting", b"* BYE busy\r\n"),
        ("greeting", b"a" * 200_000),
        ("CAPABILITY", b"* CAPABILITY NOTHING\r\nTAG OK\r\n"),
        ("EXAMINE", b"TAG OK done\r\n"),
        ("EXAMINE", b"* OK [UIDVALIDITY 0] x\r\n* OK [UIDNEXT 1] x\r\nTAG OK done\r\n"),
        ("EXAMINE", b"* OK [UIDVALIDITY x] x\r\n* OK [UIDNEXT 1] x\r\nTAG OK done\r\n"),
        ("EXAMINE", b"* OK [UIDVALIDITY 99999999999] x\r\n* OK [UIDNEXT 1] x\r\nTAG OK done\r\n"),
        ("UID SEARCH", b"TAG NO never\r\n"),
        ("UID SEARCH", b"* SEARCH " + b"1 " * 100_000 + b"\r\nTAG OK done\r\n"),
        ("UID SEARCH", b"* SEARCH 1\r\n" * 1_000_000 + b"TAG OK done\r\n"),
        ("UID FETCH", b"* 1 FETCH (UID 1 BODY[]<0> {4000000000}\r\n" + b"a" * 9_000_000),
        ("UID FETCH", b"* 1 FETCH (UID 1 BODY[]<0> {" + b"9" * 50_000 + b"}\r\n"),
        ("UID FETCH", b"\xff\xfe\x00{-1}\r\n"),
    ):
        server.says = {words: said}
        with pytest.raises(MailboxUnreachable):
            await read(server)


async def test_a_mail_that_is_gone_is_passed_over_and_one_that_is_not_given_now_is_not(server: ImapServer) -> None:
    """Whoever takes it for one that is gone never reads it: the position of the mailbox is behind it then."""
    for number in range(15):
        server.add(MAIL.format(number))
    for said in (
        b"TAG OK done\r\n",
        b"* 15 FETCH (UID 2 RFC822.SIZE 3 BODY[]<0> {3}\r\nabc)\r\nTAG OK done\r\n",
        b"* 15 FETCH (FLAGS ())\r\nTAG OK done\r\n",
        b"* 15 FETCH (UID 15 BODY[]<0> NIL)\r\nTAG OK done\r\n",
        b"TAG NO [EXPUNGEISSUED] some are gone\r\n",
        b"TAG NO [nonexistent] gone\r\n",
    ):
        server.says = {"UID FETCH 14 ": said.replace(b"15", b"14")}
        assert await uids(server, 12) == ([13, 15], False), said
    for said in (b"NO [UNAVAILABLE] later", b"NO [SERVERBUG] oops", b"NO not now", b"BAD oops"):
        server.says = {"UID FETCH 14 ": b"TAG " + said + b"\r\n"}
        assert await uids(server, 12) == ([13], True), said
        with pytest.raises(MailboxUnreachable, match=r"does not (give the mail 14|answer as an IMAP server should)"):
            await read(server, 13)
    for after, listed, expected in (
        (14, (9999999999, 4294967296, *range(1, 40)), ([15], True)),
        (15, (9999999999, *range(1, 40)), ([], False)),
        (2, (*range(1, 4), *range(100, 120), 15), ([3, 15], True)),
    ):
        server.says = {"UID SEARCH": b"* SEARCH " + b" ".join(b"%d" % number for number in listed) + DONE}
        found = await uids(server, after)
        assert found == expected or (after == 2 and found[0] == expected[0]), after


class Kept:
    """Keeps documents; there is room for two. With a fault it keeps none."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.texts: dict[str, str] = {}
        self._fault = fault

    async def put(self, store_id: str, owner_id: str, name: str, text: str, language: str) -> None:
        assert owner_id == "ann"
        if self._fault is not None:
            raise self._fault
        if len(self.texts) == 2:
            raise TooLarge("the store is full")
        self.texts[name] = text


@pytest_asyncio.fixture
async def helpers() -> AsyncIterator[Helpers]:
    async with Helpers() as helpers:
        yield helpers


def reading(
    reader: ImapMailboxes, helpers: Helpers, kept: Kept, monotonic: Callable[[], float] = float
) -> Callable[..., Awaitable[Any]]:
    """Read a mailbox as ann, keeping attachments."""
    secrets = FileSecrets({"acme": {"mail": "secret", "odd": "a\r\nb"}, "*": {"common": "secret"}})
    mailboxes = Mailboxes(reader, secrets, helpers, cast("PostgresDocumentRepository", kept), monotonic=monotonic)
    senders = Senders(senders=("@example.com",))

    def read(server: ImapServer, secret: str = "mail", senders: Senders = senders) -> Awaitable[Any]:
        return mailboxes.read(ANN, place_of(server), secret, senders, wanted(), documents_prefix="mail/in/")

    return read


async def test_attachments_that_are_text_are_documents_of_the_user(server: ImapServer, helpers: Helpers) -> None:
    parts = "".join(
        f'--b\nContent-Type: text/csv\nContent-Disposition: attachment; filename="{n}.csv"\n\n{n}\n' for n in range(3)
    )
    server.add(f"From: ann@example.com\nContent-Type: multipart/mixed; boundary=b\n\n{parts}--b--\n")
    server.add("From: bob@other.example\n\nhello")
    server.add("From: ann@example.com\nContent-Type: text/html\n\n" + "<a" * 400_000)
    async with mailboxes_to(server) as reader:
        found, mails = await reading(reader, helpers, documents := Kept())(server)
        assert (found.last_uid, [mail.uid for mail in mails]) == (3, [1, 2, 3])
        assert mails[2].refusal == "it is written so that reading it takes too long"
        assert mails[1].refusal == "bob@other.example is not among the senders"
        attachments = json.loads(mails[0].data_json)["attachments"]
        named = [each.get("document") for each in attachments]
        assert named == ["mail/in/7.1/0-0.csv", "mail/in/7.1/1-1.csv", None]
        assert attachments[2]["left_out"] == "the store is full"
        assert documents.texts["mail/in/7.1/1-1.csv"] == "1"
        # The mail is read again if documents cannot be kept at that moment.
        with pytest.raises(DependencyUnavailable):
            await reading(reader, helpers, Kept(DependencyUnavailable("the database is away")))(server)
        del server.mails[3]
        for number in range(5):
            server.add(MAIL.format(number))
        times = iter([0.0, 0.0, 9.0, 11.0])
        found, mails = await reading(reader, helpers, Kept(), lambda: next(times))(server)
        assert (len(mails), found.has_more) == (2, True), "what is hard to read is read in several sessions"


async def test_no_server_is_reached_that_the_deployment_has_not_opened(server: ImapServer, helpers: Helpers) -> None:
    egress = GuardedEgress({"acme": read_rules(None, ["127.0.0.1:1"])})
    async with ImapMailboxes(egress.locate) as reader:
        for secret, field in (
            ("mail", "host"),
            ("none", "password_secret"),
            ("odd", "password_secret"),
            ("common", "password_secret"),
        ):
            with pytest.raises(InvalidField) as error:
                await reading(reader, helpers, Kept())(server, secret)
            assert error.value.metadata["field"].rpartition(".")[2] == field
    assert server.sessions == 0
