"""E-mails with HTML, attachments and threads, sent to a real SMTP server (TOOL-7, HITL-2), and the address book."""

from __future__ import annotations

import email
import email.policy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest

from pawl.agent_loop.triggers import rules as trigger_events
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.labels import MAIL_ID, MAIL_THREAD
from pawl.mailbox.mail import read_mail
from pawl.server.db.database import Database
from pawl.server.egress.mail import read_smtp_url
from pawl.tool_registry.builtin.mail.tools import (
    ATTACHMENTS_BYTES_MAX,
    RECIPIENTS_MAX,
    Mailer,
    OutboxFolder,
    SmtpMailer,
    mail_tools,
)
from pawl.tool_registry.builtin.people import LISTED_MAX, people_tools
from pawl.tool_registry.documents.rules import STORE_OWNER
from pawl.tool_registry.documents.store import PostgresDocumentRepository
from tests.fakes.manual_clock import ManualClock
from tests.mail_server import Postbox, mail_server, text_of
from tests.rpc.tool_registry.registry import Ledger, Registry, content, context, error_of, refusal, running

LETTER = {"to": ["ann@example.com"], "subject": "Report", "body": "The report is attached."}
LUNCH = {"to": ["ann@example.com"], "subject": "Lunch på fredag?", "body": "At noon.\nBring cake."}
ANN = UserId("ann")


class Office:
    """A registry with mail, documents and the address book, and the mails that were sent."""

    def __init__(
        self, registry: Registry, documents: PostgresDocumentRepository, ledger: Ledger, postbox: Postbox
    ) -> None:
        self.registry, self.postbox, self.ledger, self._documents = registry, postbox, ledger, documents
        self._calls = 0

    async def put(self, name: str, text: str, owner: UserId = ANN, store: str = "acme") -> None:
        await self._documents.put(StoreId(store), owner, name, text, "simple")

    async def result(self, name: str, arguments: Any) -> Any:
        self._calls += 1
        return await self.registry.run_approved(name, arguments, call=f"c{self._calls}")

    async def send(self, **changes: Any) -> Any:
        return content(await self.result("send_email", LETTER | changes))

    async def sent(self, **changes: Any) -> EmailMessage:
        result = await self.send(**changes)
        assert result["sent"], result
        return self.postbox.messages()[-1]

    async def people(self, query: str = "", **who: str) -> Any:
        self._calls += 1
        return content(
            await self.registry.run("list_people", {"query": query}, call=f"c{self._calls}", who=context(**who))
        )


@asynccontextmanager
async def opened(
    database_url: str, folder: Path, mailer: Mailer, clock: ManualClock, postbox: Postbox
) -> AsyncIterator[Office]:
    async with Database(database_url, application_name="test") as database:
        documents, ledger = PostgresDocumentRepository(database), Ledger()
        mail = mail_tools(mailer, documents, ledger, clock, sender="pawl@example.org")
        async with running(database_url, folder, [*mail, *people_tools(documents)]) as registry:
            yield Office(registry, documents, ledger, postbox)


@pytest.fixture
async def office(database_url: str, tmp_path: Path, clock: ManualClock) -> AsyncIterator[Office]:
    async with mail_server() as (postbox, port):
        mailer = SmtpMailer(read_smtp_url(f"smtp://127.0.0.1:{port}"))
        async with opened(database_url, tmp_path, mailer, clock, postbox) as office:
            yield office


async def test_html_and_attached_documents_arrive_unchanged(office: Office) -> None:
    texts = ("name;sum\r\nGrüße;1\n", "no line break at the end", "{}")
    for name, text in zip(("reports/Årsrapport.csv", "notes", "data.json"), texts, strict=True):
        await office.put(name, text)
    page = '<p>The <b>report</b> is attached: "Grüße"</p>'
    message = await office.sent(html=page, attachments=["reports/Årsrapport.csv", "notes", "data.json", "notes"])
    assert text_of(message).splitlines() == ["The report is attached."]
    html = message.get_body(("html",))
    assert html is not None
    assert html.get_content().splitlines() == [page]
    assert [(part.get_filename(), part.get_content_type()) for part in message.iter_attachments()] == [
        ("Årsrapport.csv", "text/csv"),
        ("notes", "text/plain"),
        ("data.json", "application/json"),
    ]
    assert [part.get_payload(decode=True) for part in message.iter_attachments()] == [text.encode() for text in texts]


async def test_approvers_see_the_html_and_the_attachments(office: Office) -> None:
    verdict = await office.registry.check("send_email", LETTER | {"html": "<p>Pay now!</p>", "attachments": ["a", "b"]})
    shown = (
        "To: ann@example.com\nSubject: Report\nAttachments: a, b\n\nThe report is attached.\n\nHTML:\n<p>Pay now!</p>"
    )
    assert (verdict.approval_cause, verdict.preview) == ("category SENSITIVE", shown)


async def test_the_stores_documents_can_be_attached_but_other_users_documents_cannot(office: Office) -> None:
    await office.put("both", "mine")
    await office.put("both", "the store's", STORE_OWNER)
    await office.put("shared", "the store's", STORE_OWNER)
    await office.put("secret", "of bob", UserId("bob"))
    await office.put("secret", "of another store", store="other")
    assert "set shared to true or false" in (await office.send(attachments=["both"]))["error"]
    for shared, text in ((True, b"the store's"), (False, b"mine")):
        (part,) = (await office.sent(attachments=["both"], shared=shared)).iter_attachments()
        assert part.get_payload(decode=True) == text
    assert [part.get_filename() for part in (await office.sent(attachments=["shared"])).iter_attachments()] == [
        "shared"
    ]
    assert (await office.send(attachments=["secret"]))["error"].startswith("there is no document 'secret'")


async def test_invalid_mail_is_refused_without_sending_anything(office: Office) -> None:
    many = [f"user{number}@example.com" for number in range(RECIPIENTS_MAX + 1)]
    whole = 1024 * 1024
    for number in range(ATTACHMENTS_BYTES_MAX // whole + 1):
        await office.put(f"large{number}", "x" * whole)
    hostile = "=?utf-8?q?a=0D=0ABcc:_eve@example.com?="
    await office.put(hostile, "x")
    await office.put("report.csv", "x")
    large = [f"large{number}" for number in range(ATTACHMENTS_BYTES_MAX // whole + 1)]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"to": many[:1], "cc": many[1:]}, f"at most {RECIPIENTS_MAX} recipients, got {RECIPIENTS_MAX + 1}"),
        ({"attachments": ["reprt.csv"]}, "there is no document 'reprt.csv'; did you mean 'report.csv'?"),
        ({"attachments": large}, f"over the limit of {ATTACHMENTS_BYTES_MAX} bytes; nothing was sent"),
        ({"attachments": [hostile]}, "its name must not contain =?"),
        ({"subject": "a\u2028Bcc: eve@example.com"}, "the subject must be one line"),
        ({"subject": "a\x85Bcc: eve@example.com"}, "the subject must be one line"),
        ({"to": ["=?utf-8?q?a?=@example.com"]}, "must not contain =?"),
    ]
    for changes, error in refused:
        assert error in (await office.send(**changes))["error"]
    unfit: list[dict[str, Any]] = [{"to": many}, {"attachments": ["report.csv"] * 11}, {"html": "x" * 200_001}]
    bad = ["bob", "ann@localhost", "a@b..example", "Ann <ann@b.example>", "a@b@c.example", "a@b.example, c@d.example"]
    bad += ["a@b.example\r\nBcc: eve@b.example", "a@b.example\n", "eve@exa mple.com", "a@b.example%0aeve@b.example", ""]
    for each in [*unfit, *({"cc": [address]} for address in bad)]:
        assert (await office.registry.check("send_email", LETTER | each)).error_reason == "INVALID_ARGUMENTS"
    assert office.postbox.envelopes == []
    await office.sent(attachments=large[:-1])


async def test_attachment_names_cannot_add_headers_or_hide_their_file_type(office: Office) -> None:
    for name, shown in [('a"; x="b.txt', 'a"; x="b.txt'), ("evil\u202etxt.exe", "evil_txt.exe"), ("dir/", "document")]:
        await office.put(name, "x")
        (part,) = (await office.sent(attachments=[name])).iter_attachments()
        assert part.get_filename() == shown
        assert sorted(part.keys()) == [
            *("Content-Disposition", "Content-Transfer-Encoding", "Content-Type", "MIME-Version")
        ]


async def test_an_answer_joins_the_thread_of_the_mail_that_started_the_run(office: Office) -> None:
    """The run of a mailbox trigger has the ids in its labels. For other mails, the model copies the id."""
    raw = (
        b"From: Ann <ann@example.com>\r\nTo: pawl@example.org\r\nSubject: Order\r\nMessage-ID: <3?=a@x.example.com>\r\n"
        b"References: <1@x.example.com>\r\n <2@x.example.com>\r\nIn-Reply-To: <2@x.example.com>\r\n\r\nWhen?\r\n"
    )
    event = read_mail(raw, False, own="pawl@example.org", authserv_id="", senders=["@example.com"])
    assert "set in_reply_to, or leave out reply" in (await office.send(reply=True))["error"]
    line = trigger_events.line({"source": "mail"}, {"data": event}, bytes_max=10_000)
    office.ledger.of_runs = trigger_events.mail_labels(line)
    answer = await office.sent(subject=f"Re: {event['subject']}", html="<p>Soon</p>", reply=True)
    assert answer["In-Reply-To"] == "<3?=a@x.example.com>"
    assert answer["References"].split() == ["<1@x.example.com>", "<3?=a@x.example.com>"]
    other = await office.sent(in_reply_to="<4@x.example.com>")
    assert (other["In-Reply-To"], other["References"]) == ("<4@x.example.com>",) * 2
    verdict = await office.registry.check("send_email", LETTER | {"reply": True})
    assert "\nAnswers the e-mail that started the run\n" in verdict.preview
    office.ledger.of_runs = {MAIL_ID: "<=?utf-8?q?=0D=0ABcc:_eve@example.com?=@x>", MAIL_THREAD: "<1@x.example.com>"}
    assert (await office.sent(reply=True))["References"] == "<1@x.example.com>"
    first, last = (f"<{n}{'x' * 80}@mail.example.com>" for n in "ab")
    office.ledger.of_runs = {MAIL_ID: last, MAIL_THREAD: first}
    await office.sent(reply=True)
    sent = office.postbox.envelopes[-1].content
    assert isinstance(sent, bytes)
    assert f"\r\nReferences: {first}\r\n {last}\r\n".encode() in sent
    for hostile in (
        "<=?utf-8?q?=0D=0ABcc:_eve@example.com?=@x>",
        "<a b@x>",
        "<a@x> <b@x>",
        "<a@x>\r\nBcc: eve@example.com",
    ):
        verdict = await office.registry.check("send_email", LETTER | {"in_reply_to": hostile})
        assert verdict.error_reason == "INVALID_ARGUMENTS", hostile
    # An answer does not fire a trigger of another mailbox.
    refused = read_mail(sent, False, own="other@example.com", authserv_id="", senders=["@example.org"])
    assert "Auto-Submitted: auto-replied" in refused["refusal"]


async def test_people_of_the_store_are_found_by_any_column(office: Office) -> None:
    await office.put("people.csv", "name,email\nEve,eve@example.com\n")
    assert "the store has no address book" in (await office.people())["error"]
    book = (
        'Name;Email;Role\nAnn Lee;ann@example.com;Stakeholder, sales\n"Bo; Jr";bo@example.com;\n;nobody@example.com;\n'
    )
    await office.put("people.csv", f"\ufeff{book}", STORE_OWNER)
    ann = {"name": "Ann Lee", "email": "ann@example.com", "role": "Stakeholder, sales"}
    everyone = [ann, {"name": "Bo; Jr", "email": "bo@example.com"}]
    assert await office.people() == {"people": everyone, "note": "1 lines have no name or email"}
    assert ((await office.people("sales ann"))["people"], (await office.people("zoe"))["people"]) == ([ann], [])
    assert "error" in await office.people(store="other")
    assert (await office.people(user="bob"))["people"] == everyone


@pytest.mark.parametrize(
    "book", ["", "Ann,ann@example.com\n", "name,mail\nAnn,ann@example.com\n", "name,email" + ",x" * 20]
)
async def test_address_book_without_its_columns_is_an_error(office: Office, book: str) -> None:
    await office.put("people.csv", book, STORE_OWNER)
    assert "must name at most 20 columns, among them name and email" in (await office.people())["error"]


async def test_long_address_book_is_cut_with_a_note(office: Office) -> None:
    rows = "".join(f"Ann {number},ann{number}@example.com\n" for number in range(LISTED_MAX + 5))
    await office.put("people.csv", f"name,email\n{rows}", STORE_OWNER)
    found = await office.people("ann")
    assert (len(found["people"]), found["note"]) == (LISTED_MAX, "5 more match: use more words in query")
    await office.put("people.csv", "name,email\n" + "x" * 10_001, STORE_OWNER)
    assert "has a line with more than 10000 characters" in (await office.people())["error"]


async def test_edited_email_is_sent_once_after_approval(office: Office) -> None:
    """HITL-2, HITL-3: send_email is sensitive and AT_MOST_ONCE, so a repeated call does not send it again."""
    box, registry = office.postbox, office.registry
    many = [f"{name}@example.com" for name in ("ann", "bo", "cy", "nobody")]
    written = await registry.check("send_email", LUNCH | {"to": many, "cc": [*many, "ed@example.com"]})
    assert written.approval_cause == "category SENSITIVE, bulk of 5"
    assert written.preview.startswith(f"To: {', '.join(many)}\nCc: ann@example.com, bo@example.com,")
    answered = f"<{'x' * 80}@mail.example.com>"
    edited = LUNCH | {"to": many[:1], "cc": many[1:], "in_reply_to": answered}
    again = await registry.check("send_email", edited)
    assert again.approval_cause == "category SENSITIVE, bulk of 4"
    assert again.preview.endswith("Subject: Lunch på fredag?\n\nAt noon.\nBring cake.")
    assert await refusal(registry.run("send_email", edited, approved_digest=written.digest)) == "APPROVAL_REQUIRED"
    for _ in range(2):
        sent = content(await registry.run("send_email", edited, approved_digest=again.digest))
        assert (sent["sent"], sent["refused"]) == (True, ["nobody@example.com"])
    (envelope,) = box.envelopes
    assert envelope.rcpt_tos == many[:3]
    (message,) = box.messages()
    assert (message["To"], message["Cc"], message["From"]) == (many[0], ", ".join(many[1:]), "pawl@example.org")
    assert (message["Subject"], message["Message-ID"]) == ("Lunch på fredag?", sent["message_id"])
    assert message.get_content().splitlines() == ["At noon.", "Bring cake."]
    sent_bytes = box.envelopes[0].content
    assert isinstance(sent_bytes, bytes)
    headers = (f"In-Reply-To: {answered}", f"References: {answered}", "Auto-Submitted: auto-replied")
    assert [header for header in headers if f"\r\n{header}\r\n".encode() not in sent_bytes] == []
    refused = await registry.run_approved("send_email", LUNCH | {"to": [many[3]]}, call="refused")
    assert "nobody@example.com (550)" in content(refused)["error"]
    changes: list[dict[str, Any]] = [
        {"subject": "Hi\r\nBcc: eve@example.com"},
        {"subject": "Hi\x0bthere"},
        {"subject": "=?utf-8?q?=0D=0ABcc:_eve@example.com?="},
        {"to": ["=?utf-8?q?a?=@example.com"]},
    ]
    for number, change in enumerate(changes):
        assert error_of(await registry.run_approved("send_email", LUNCH | change, call=f"c{number}")), change
    assert len(box.envelopes) == 1


async def test_email_fails_clearly_without_a_mail_server(database_url: str, tmp_path: Path, clock: ManualClock) -> None:
    async with opened(
        database_url, tmp_path, SmtpMailer(read_smtp_url("smtp://127.0.0.1:9")), clock, Postbox()
    ) as office:
        failed = await office.registry.run_approved("send_email", LUNCH, call="b")
        assert content(failed) == {"error": "the mail server cannot be reached; nothing was sent"}
    async with opened(database_url, tmp_path, OutboxFolder(tmp_path / "outbox"), clock, Postbox()) as office:
        put = content(await office.registry.run_approved("send_email", LUNCH, call="c1"))
    assert (put["sent"], put["outbox"], "PAWL_SMTP_URL" in put["note"]) == (False, "acme/c1.eml", True)
    (path,) = (path for path in (tmp_path / "outbox").rglob("*") if path.is_file())
    assert (path, path.stat().st_mode & 0o777) == (tmp_path / "outbox/acme/c1.eml", 0o600)
    assert email.message_from_bytes(path.read_bytes(), policy=email.policy.default)["Subject"] == "Lunch på fredag?"


def test_mail_server_is_parsed_from_its_url() -> None:
    server = read_smtp_url("smtps://us%40er:p%2Fw@mail.example.com")
    found = (server.host, server.port, server.username, server.password, server.use_tls, server.start_tls)
    assert found == ("mail.example.com", 465, "us@er", "p/w", True, False)
    assert read_smtp_url("smtp+starttls://h").start_tls is True
    assert read_smtp_url("smtp://h:2525").port == 2525
    for url in ("http://x", "smtp://", "smtp:x", "smtp://host/path", "host:25"):
        with pytest.raises(ValueError, match="must be smtp://") as error:
            read_smtp_url(url)
        assert url not in str(error.value).replace("smtp://,", "")
