"""Mailboxes over real connections: what comes is read once and bounded, whatever the server says."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from ipaddress import ip_address
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio
import trustme

from pawl.chassis.auth import Principal
from pawl.chassis.egress import GuardedEgress
from pawl.chassis.egress_rules import Target, read_rules
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.mailbox_place import MailboxPlace
from pawl.chassis.tasks import end
from pawl.errors import DependencyUnavailable, InvalidField, MailboxUnreachable, TooLarge
from pawl.tool_registry.adapters.mail import imap
from pawl.tool_registry.adapters.mail.imap import SESSION_SECONDS, SESSIONS_MAX, ImapMailboxes
from pawl.tool_registry.adapters.process.helpers import Helpers
from pawl.tool_registry.adapters.secret_file import FileSecrets
from pawl.tool_registry.app.documents.documents import Documents
from pawl.tool_registry.app.mailboxes.mailboxes import Mailboxes, RawMails, Wanted
from pawl.tool_registry.domain.mail import MAIL_BYTES_MAX, Senders
from tests.fakes.imap_server import ImapServer
from tests.poll import until

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


async def test_a_mailbox_in_which_very_many_mails_wait_is_read_from_the_first_one_on(server: ImapServer) -> None:
    """As after a long pause, or when somebody floods it: no list of them stands in one line."""
    server.mails = dict.fromkeys(range(1, 20_001), b"From: ann@example.com\r\n\r\nhello")
    some = await read(server, 3, mails_max=2)
    assert ([mail.uid for mail in some.mails], some.has_more, some.last_uid) == ([4, 5], True, 20_000)
    for uid in range(10, 18_000):
        del server.mails[uid]
    behind = await read(server, 9, mails_max=2)
    assert ([mail.uid for mail in behind.mails], behind.has_more) == ([18_000, 18_001], True)
    last = await read(server, 19_999, mails_max=2)
    assert ([mail.uid for mail in last.mails], last.has_more) == ([20_000], False)


async def test_mails_of_a_range_that_are_all_listed_and_gone_are_in_the_way_of_none_of_a_later_one(
    server: ImapServer,
) -> None:
    server.mails = dict.fromkeys(range(1, 12_001), b"From: ann@example.com\r\n\r\nhello")
    for uid in (3, 4, 4_000):
        server.says[f"UID FETCH {uid} "] = b"TAG OK done\r\n"
    for uid in (*range(5, 4_000), *range(4_001, 11_000)):
        del server.mails[uid]
    some = await read(server, 2, mails_max=2)
    assert ([mail.uid for mail in some.mails], some.has_more) == ([11_000, 11_001], True)


async def test_of_a_large_mail_the_beginning_is_read(server: ImapServer) -> None:
    server.add(b"From: ann@example.com\n\n" + b"a" * (2 * MAIL_BYTES_MAX))
    server.add(MAIL)
    large, small = (await read(server)).mails
    assert (len(large.content), large.is_cut, small.is_cut) == (MAIL_BYTES_MAX, True, False)


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


async def test_what_is_wrong_is_said_without_the_password(server: ImapServer) -> None:
    with pytest.raises(MailboxUnreachable, match="does not let the user in") as refused:
        await read(server, password="wrong-pass")
    assert "wrong-pass" not in refused.value.message
    with pytest.raises(MailboxUnreachable, match="has no folder Spam"):
        await read(server, folder="Spam")
    server.says["CAPABILITY"] = b"* CAPABILITY IMAP4rev1\r\nTAG OK done\r\n"
    assert (await read(server)).uid_validity == 7
    with pytest.raises(MailboxUnreachable, match="does not let the user in"):
        await read(server, password="wrong-pass")


@pytest.mark.parametrize("username", ["ann", "EXAMPLE\\ann", "ann of sales", 'ann"(1)', "{3}"])
async def test_any_username_gets_in_by_login(username: str) -> None:
    async with ImapServer(username=username) as server:
        server.says["CAPABILITY"] = b"* CAPABILITY IMAP4rev1\r\nTAG OK done\r\n"
        assert (await read(server, username=username)).uid_validity == 7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("greeting", b"220 smtp.example ESMTP\r\n"),
        ("greeting", b"* BYE busy\r\n"),
        ("greeting", b"a" * 200_000),
        ("greeting", b"* OK " + b"a" * 200_000 + b"\r\n"),
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
    ],
)
async def test_a_server_that_lies_is_unreachable(server: ImapServer, words: str, said: bytes) -> None:
    server.add(MAIL)
    server.says[words] = said
    with pytest.raises(MailboxUnreachable):
        await read(server)


@pytest.mark.parametrize(
    "said",
    [
        b"TAG OK done\r\n",
        b"* 1 FETCH (UID 2 RFC822.SIZE 3 BODY[]<0> {3}\r\nabc)\r\nTAG OK done\r\n",
        b"* 1 FETCH (FLAGS ())\r\nTAG OK done\r\n",
        b"* 1 FETCH (UID 1 BODY[]<0> NIL)\r\nTAG OK done\r\n",
    ],
)
async def test_a_mail_that_is_gone_is_none(server: ImapServer, said: bytes) -> None:
    server.add(MAIL)
    server.says["UID FETCH"] = said
    found = await read(server)
    assert (found.mails, found.last_uid, found.has_more) == ((), 1, False)


@pytest.mark.parametrize("said", [b"[EXPUNGEISSUED] some are gone", b"[nonexistent] gone"])
async def test_a_mail_of_which_the_server_says_that_it_is_gone_is_in_the_way_of_no_other(
    server: ImapServer, said: bytes
) -> None:
    for number in range(3):
        server.add(MAIL.format(number))
    server.says["UID FETCH 2 "] = b"TAG NO " + said + b"\r\n"
    found = await read(server)
    assert ([mail.uid for mail in found.mails], found.has_more) == ([1, 3], False)


@pytest.mark.parametrize("said", [b"NO [UNAVAILABLE] later", b"NO [SERVERBUG] oops", b"NO not now", b"BAD oops"])
async def test_a_mail_that_a_server_does_not_give_now_is_not_passed_over(server: ImapServer, said: bytes) -> None:
    """Whoever takes it for one that is gone never reads it: the place of the mailbox is behind it then."""
    for number in range(3):
        server.add(MAIL.format(number))
    server.says["UID FETCH 2 "] = b"TAG " + said + b"\r\n"
    found = await read(server)
    assert ([mail.uid for mail in found.mails], found.has_more) == ([1], True)
    with pytest.raises(MailboxUnreachable, match=r"does not (give the mail 2|answer as an IMAP server should)"):
        await read(server, 1)
    server.says.clear()
    assert [mail.uid for mail in (await read(server, 1)).mails] == [2, 3]


async def test_mails_that_are_listed_and_gone_are_in_the_way_of_no_other(server: ImapServer) -> None:
    """Nor is a mailbox read again at once that has nothing else, or a number taken that is none."""
    for number in range(15):
        server.add(MAIL.format(number))
    server.says["UID SEARCH"] = b"* SEARCH 9999999999 4294967296 " + b" ".join(b"%d" % n for n in range(1, 40)) + DONE
    found = await read(server, 14)
    assert ([mail.uid for mail in found.mails], found.has_more) == ([15], True)
    found = await read(server, 15)
    assert (found.mails, found.has_more) == ((), False)
    server.says["UID SEARCH"] = b"* SEARCH " + b" ".join(b"%d" % n for n in (*range(1, 4), *range(100, 120), 15)) + DONE
    assert [mail.uid for mail in (await read(server, 2)).mails] == [3, 15]


async def test_a_server_that_does_not_answer_is_given_up(server: ImapServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pawl.tool_registry.adapters.mail.imap.SESSION_SECONDS", 0.2)
    server.says["CAPABILITY"] = b"*"
    with pytest.raises(MailboxUnreachable, match="in time"):
        await read(server)
    server.says["greeting"] = b""
    with pytest.raises(MailboxUnreachable, match="in time"):
        await read(server)


class SlowServer(ImapServer):
    """It sends the beginning of a third mail, and `time` is over, or the connection."""

    def __init__(self, end: bytes) -> None:
        super().__init__()
        self.time = 0.0
        self._end = end

    async def _answer(self, command: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        if not command.startswith("UID FETCH 3 "):
            return await super()._answer(command, reader, writer)
        if self._end:
            self.time = 2 * SESSION_SECONDS
        writer.write(b"* 3 FETCH (UID 3 RFC822.SIZE 100 BODY[]<0> {100}\r\nFrom: Ann")
        if not self._end:
            writer.close()
        return self._end


@pytest.mark.parametrize("end", [b" <ann", b""], ids=["the time is over", "the connection ends"])
async def test_mails_that_came_whole_are_kept_when_a_look_ends_before_it_is_done(
    monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    """Else a mailbox whose mails come slowly would be read from the same mail on for ever."""
    async with SlowServer(end) as slow:
        for number in range(5):
            slow.add(MAIL.format(number))
        monkeypatch.setattr(imap, "time", SimpleNamespace(monotonic=lambda: slow.time))
        found = await read(slow)
        assert ([mail.uid for mail in found.mails], found.has_more) == ([1, 2], True)
        slow.time = 0.0
        with pytest.raises(MailboxUnreachable):
            await read(slow, 2)
        slow.time = 0.0
        assert [mail.uid for mail in (await read(slow, 3)).mails] == [4, 5]


async def test_addresses_that_do_not_answer_have_the_time_of_one_look_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever chooses what a name means does not choose for how long a place is taken."""
    now = 100.0

    def create_connection(_address: object, seconds: float) -> socket.socket:
        nonlocal now
        now += seconds
        raise TimeoutError

    async def locate(store_id: StoreId, url: str) -> Any:
        target = Target(scheme="https", host="imap.example", port=993, target="/", address=None)
        return target, [ip_address("192.0.2.1")] * 50

    monkeypatch.setattr(imap, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(socket, "create_connection", create_connection)
    place = MailboxPlace(host="imap.example", port=993, plaintext=False, username="ann", folder="INBOX")
    async with ImapMailboxes(locate) as mailboxes:
        with pytest.raises(MailboxUnreachable, match="in time"):
            await mailboxes.read(ACME, place, "secret", wanted())
    assert now == 100.0 + SESSION_SECONDS


async def test_a_server_that_hangs_holds_up_its_own_store_and_no_other(server: ImapServer) -> None:
    """A store has half of the places at most; who gives up leaves its place when the look has ended."""
    server.add(MAIL)
    async with ImapServer() as hanging, mailboxes_to(server, hanging) as mailboxes:
        hanging.answers.clear()
        looks = [
            asyncio.create_task(mailboxes.read(ACME, place_of(hanging), "secret", wanted()))
            for _ in range(2 * SESSIONS_MAX)
        ]

        async def have_begun() -> bool:
            return hanging.sessions >= SESSIONS_MAX // 2

        await until(have_begun)
        assert len((await mailboxes.read(OTHER, place_of(server), "secret", wanted())).mails) == 1
        await end(looks[SESSIONS_MAX:])
        assert hanging.sessions == SESSIONS_MAX // 2
        hanging.answers.set()
        assert {found.uid_validity for found in await asyncio.gather(*looks[:SESSIONS_MAX])} == {7}


async def test_nobody_is_reached_whom_the_deployment_has_not_opened(server: ImapServer) -> None:
    egress = GuardedEgress({"acme": read_rules(None, ["127.0.0.1:1"])})
    async with ImapMailboxes(egress.locate) as reader:
        secrets = FileSecrets({"acme": {"mail": "secret", "odd": "a\r\nb"}, "*": {"common": "secret"}})
        mailboxes = Mailboxes(reader, secrets, cast("Any", None), cast("Documents", None), monotonic=float)

        async def refused(secret: str) -> str:
            with pytest.raises(InvalidField) as error:
                await mailboxes.read(ANN, place_of(server), secret, Senders(), wanted(), documents_prefix="")
            return error.value.metadata["field"].rpartition(".")[2]

        assert await refused("mail") == "host"
        for secret in ("none", "odd", "common"):
            assert await refused(secret) == "password_secret"
    assert server.sessions == 0


class Kept:
    """Keeps documents; there is room for two. With a fault it keeps none."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.texts: dict[str, str] = {}
        self._fault = fault

    async def put(self, caller: Principal, *, shared: bool, name: str, text: str, language: str) -> None:
        assert (caller.user_id, shared) == ("ann", False)
        if self._fault is not None:
            raise self._fault
        if len(self.texts) == 2:
            raise TooLarge("the store is full")
        self.texts[name] = text


async def test_attachments_that_are_text_are_documents_of_the_user(server: ImapServer) -> None:
    parts = "".join(
        f'--b\nContent-Type: text/csv\nContent-Disposition: attachment; filename="{n}.csv"\n\n{n}\n' for n in range(3)
    )
    server.add(f"From: ann@example.com\nContent-Type: multipart/mixed; boundary=b\n\n{parts}--b--\n")
    server.add("From: bob@example.com\n\nhello")
    server.add("From: ann@example.com\nContent-Type: text/html\n\n" + "<a" * 400_000)
    documents = Kept()
    async with mailboxes_to(server) as reader, Helpers() as helpers:
        secrets = FileSecrets({"acme": {"mail": "secret"}})
        mailboxes = Mailboxes(reader, secrets, helpers, cast("Documents", documents), monotonic=float)
        senders = Senders(senders=("ann@example.com",))
        found, mails = await mailboxes.read(
            ANN, place_of(server), "mail", senders, wanted(), documents_prefix="mail/in/"
        )
    assert (found.last_uid, [mail.uid for mail in mails]) == (3, [1, 2, 3])
    assert mails[2].refusal == "it is written so that reading it takes too long"
    assert mails[1].refusal == "bob@example.com is not among the senders"
    data = json.loads(mails[0].data_json)
    assert [each.get("document") for each in data["attachments"]] == [
        "mail/in/7.1/0-0.csv",
        "mail/in/7.1/1-1.csv",
        None,
    ]
    assert data["attachments"][2]["left_out"] == "the store is full"
    assert documents.texts["mail/in/7.1/1-1.csv"] == "1"


async def test_no_attachment_is_left_out_because_documents_cannot_be_kept_at_that_moment(server: ImapServer) -> None:
    """The mail is read again, as nothing was said of it."""
    part = 'Content-Type: text/csv\nContent-Disposition: attachment; filename="a.csv"\n\n1\n'
    server.add(f"From: ann@example.com\nContent-Type: multipart/mixed; boundary=b\n\n--b\n{part}--b--\n")
    documents = Kept(DependencyUnavailable("the database is away"))
    async with mailboxes_to(server) as reader, Helpers() as helpers:
        secrets = FileSecrets({"acme": {"mail": "secret"}})
        mailboxes = Mailboxes(reader, secrets, helpers, cast("Documents", documents), monotonic=float)
        senders = Senders(senders=("@example.com",))
        with pytest.raises(DependencyUnavailable):
            await mailboxes.read(ANN, place_of(server), "mail", senders, wanted(), documents_prefix="")


async def test_mails_that_are_hard_to_read_are_read_in_several_goes(server: ImapServer) -> None:
    for number in range(5):
        server.add(MAIL.format(number))
    times = iter([0.0, 0.0, 9.0, 11.0])
    async with mailboxes_to(server) as reader, Helpers() as helpers:
        secrets = FileSecrets({"acme": {"mail": "secret"}})
        mailboxes = Mailboxes(reader, secrets, helpers, cast("Documents", Kept()), monotonic=lambda: next(times))
        senders = Senders(senders=("@example.com",))
        found, mails = await mailboxes.read(ANN, place_of(server), "mail", senders, wanted(), documents_prefix="")
    assert ([mail.uid for mail in mails], found.has_more) == ([1, 2], True)
