"""E-mails: plain text from any input, and identical bytes for every attempt (NOTE-1)."""

from __future__ import annotations

import email
import email.policy
import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from email.message import EmailMessage
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.chassis.visible import visible
from pawl.errors import InvalidField
from pawl.notifier.channels.rules import (
    Channel,
    ChannelId,
    ChannelKind,
    channel_of_token,
    checked,
    code_of,
    kind_of,
    unsubscribe_token,
)
from pawl.notifier.deliveries.rules import CODE, Attempt, Candidate, DeliveryId, body_of, body_of_own
from pawl.notifier.deliveries.senders import email_message
from pawl.notifier.inbox.rules import Draft, EventId, Inbox, NotificationId, NotificationKind
from tests.tables import not_refused

NOW = datetime(2026, 5, 1, 12, 30, tzinfo=UTC)
INBOX = Inbox(store_id=StoreId("acme"), user_id=UserId("ann"))
DRAFT = Draft(
    inbox=INBOX,
    notification_id=NotificationId("ntf_1"),
    kind=NotificationKind.RUN_COMPLETED,
    run_id=RunId("run_1"),
    conversation_id=ConversationId("conv_1"),
    call_id=CallId("call_1"),
    event_id=EventId("evt_1"),
    title="Run completed",
    body="17 * 23 = 391",
    create_time=NOW,
)
TO = (ChannelId("mail_1"), "mailto:ann@example.org")
HEADERS = ["From", "To", "Subject", "Date", "Message-ID", "In-Reply-To", "References", "Auto-Submitted"]
MIME = ["Content-Type", "MIME-Version"]


def attempt(body: str, kind: str = "run.completed", delivery_id: str = "dlv_1") -> Attempt:
    candidate = Candidate(
        delivery_id=DeliveryId(delivery_id), channel_id=ChannelId("mail_1"), inbox=INBOX, host="", is_failing=False
    )
    return Attempt(
        candidate=candidate,
        url="mailto:ann@example.org",
        secrets=[b"s"],
        type=kind,
        body=body,
        tries=1,
        claim_until=NOW,
        saved_by=Principal(),
    )


def read(data: bytes) -> EmailMessage:
    message = email.message_from_bytes(data, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    assert [part.defects for part in message.walk()] == [[], [], []]
    return message


def mail_of(draft: Draft) -> EmailMessage:
    return read(email_message(attempt(body_of(draft)), sender="pawl@example.com"))


def parts(message: EmailMessage) -> tuple[str, str]:
    text, html = (message.get_body((kind,)) for kind in ("plain", "html"))
    assert text is not None
    assert html is not None
    return text.get_content(), html.get_content()


def test_every_attempt_sends_the_same_bytes_as_text_and_html() -> None:
    message = mail_of(DRAFT)
    headers = {"From": "Pawl <pawl@example.com>", "To": "ann@example.org", "Subject": "Run completed"}
    headers |= {"Message-ID": "<dlv_1@example.com>", "References": "<conv_1.acme@example.com>"}
    assert {name: message[name] for name in headers} == headers, "a conversation is one thread"
    assert message["Date"].datetime == NOW
    text, html = parts(message)
    for expected in ("Run completed", "17 * 23 = 391", "run: run_1", "pawl notify delete mail_1"):
        assert (expected in text, expected in html) == (True, True), expected
    first = attempt(body_of(DRAFT))
    assert email_message(first, sender="p@example.com") == email_message(
        replace(first, tries=7), sender="p@example.com"
    )

    assert mail_of(replace(DRAFT, conversation_id=ConversationId("")))["References"] is None


@pytest.mark.parametrize(
    ("changes", "url"),
    [
        ({}, "https://pawl.example.com/inbox?call=call_1"),
        ({"call_id": ""}, "https://pawl.example.com/runs/run_1"),
        ({"call_id": "", "run_id": ""}, ""),
    ],
    ids=["a call", "a run", "neither"],
)
def test_a_notification_links_to_its_call_or_run(changes: dict[str, Any], url: str) -> None:
    body = body_of(replace(DRAFT, **changes), "https://pawl.example.com")
    assert json.loads(body)["data"].get("url", "") == url
    text, html = parts(read(email_message(attempt(body), sender="pawl@example.com")))
    assert re.findall(r"https://\S+", text) == ([url] if url else [])
    assert re.findall(r'href="([^"]+)"', html) == ([url] if url else [])
    assert "url" not in json.loads(body_of(replace(DRAFT, **changes)))["data"], "no public URL is configured"


def test_one_click_unsubscribe_is_offered_over_https_only() -> None:
    data = email_message(attempt(body_of(DRAFT)), sender="pawl@example.com", public_url="https://pawl.example.com")
    message = read(data)
    link = f"https://pawl.example.com/unsubscribe/acme/{unsubscribe_token(b's', StoreId('acme'), *TO)}"
    one_click = "List-Unsubscribe=One-Click"
    assert (message["List-Unsubscribe"], message["List-Unsubscribe-Post"]) == (f"<{link}>", one_click)
    text, html = parts(message)
    assert text.rstrip().endswith(f"Unsubscribe: {link}")
    assert f'<a href="{link}">{link}</a>' in html
    here = read(email_message(attempt(body_of(DRAFT)), sender="pawl@example.com", public_url="http://127.0.0.1:7600"))
    assert here["List-Unsubscribe"].startswith("<http://127.0.0.1:7600/unsubscribe/acme/mail_1.")
    assert here["List-Unsubscribe-Post"] is None
    assert mail_of(DRAFT)["List-Unsubscribe"] is None


def test_an_unsubscribe_token_is_bound_to_store_channel_and_address() -> None:
    store, channel_id, url = StoreId("acme"), *TO
    made = {
        unsubscribe_token(b"s", store, channel_id, url),
        unsubscribe_token(b"t", store, channel_id, url),
        unsubscribe_token(b"s", StoreId("other"), channel_id, url),
        unsubscribe_token(b"s", store, ChannelId("mail_2"), url),
        unsubscribe_token(b"s", store, channel_id, "mailto:bob@example.org"),
    }
    assert (len(made), {channel_of_token(token) for token in made}) == (5, {"mail_1", "mail_2"})
    assert [channel_of_token(token) for token in ("", ".", "a b.c", "a/b.c", "a\0.b")] == [None] * 5


class Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, _attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


texts = st.text(max_size=300) | st.sampled_from(
    [
        "a\r\nBcc: eve@example.net\r\n\r\n<b>",
        "a\nBcc: eve@example.net",
        "a\x0b\x85\u2028Bcc: x",
        "</div><script>alert(1)</script>&amp;",
        "--=_dlv_1\r\nContent-Type: text/html\r\n\r\n<script>",
        "--=_dlv_1--\n.\n\n..\nFrom x",
        "=?utf-8?q?Bcc=3A?=",
        "=?utf-8?q?=0D=0ABcc:_eve@example.net?=",
        "=\u200b?utf-8?b?DQpCY2M6IGV2ZUBleGFtcGxlLm5ldA==?=",
        "=?utf-8?q?=E2=80=AEevil?=",
        "=?utf-8?q?=ff=fe?= \U0001f600",
        "\u202eevil\u202c \u00a0 \ufeff",
        "x" * 3000,
    ]
)


@given(texts, texts)
def test_untrusted_content_is_never_rendered_as_markup(title: str, body: str) -> None:
    title, body = (each.encode(errors="replace").decode() for each in (title, body))
    message = mail_of(replace(DRAFT, title=title, body=body))
    assert [name for name in message if name not in MIME] == HEADERS
    assert message["Subject"] == " ".join(visible(title).split()).replace("=?", "= ?"), "nothing of it was decoded"
    assert [part.get_content_type() for part in message.walk()] == [
        "multipart/alternative",
        "text/plain",
        "text/html",
    ]
    text, html = parts(message)
    page = Text()
    page.feed(html)
    assert page.tags == ["html", "body", "p", "b", "div", "p"]
    for line in visible(body).split("\n"):
        assert "".join(line.split()) in "".join(text.split())
        assert "".join(line.split()) in "".join(page.text.split())


def test_a_code_is_bound_to_its_address_and_secret() -> None:
    message = read(
        email_message(attempt(body_of_own(CODE, INBOX, ChannelId("mail_1"), NOW), CODE), sender="p@example.com")
    )
    code = code_of(b"s", "mailto:ann@example.org")
    assert (code.isdecimal(), len(code), code in message["Subject"]) == (True, 8, False)
    assert all(f"pawl notify confirm mail_1 {code}" in part for part in parts(message))
    assert code not in {code_of(b"s", "mailto:bob@example.org"), code_of(b"t", "mailto:ann@example.org")}


def channel(url: str) -> Channel:
    return Channel(channel_id=ChannelId(""), name="", url=url)


def test_a_plain_address_is_accepted_and_its_mail_is_delayed_by_default() -> None:
    found = checked(channel("MailTo:Ann.O+x@Mail.Example.ORG"))
    assert (found.url, found.kind, found.after_seconds) == ("mailto:Ann.O+x@mail.example.org", ChannelKind.EMAIL, 600)
    assert checked(replace(found, after_seconds=0)).after_seconds == 0
    assert kind_of("https://example.com/mailto:") is ChannelKind.WEBHOOK


def test_text_that_could_be_read_as_several_addresses_is_refused() -> None:
    addresses = [
        "",
        "ann",
        "ann@",
        "@example.org",
        "ann@example",
        "ann@example.org?bcc=eve@example.net",
        "ann@example.org,eve@example.net",
        "ann@example.org\r\nBcc: eve@example.net",
        "ann@example.org\n",
        "ann@[127.0.0.1]",
        '"ann x"@example.org',
        "ann@example.org@eve.example.net",
        "ann%40eve.example.net@example.org",
        "-oQ/tmp@example.org",
        ".ann@example.org",
        "a..n@example.org",
        "ann.@example.org",
        "ann@-example.org",
        "\u00e4nn@example.org",
        f"{'a' * 65}@example.org",
        f"ann@{'a.' * 130}org",
        "Ann <ann@example.org>",
        "//ann@example.org",
    ]
    assert not_refused(InvalidField, lambda address: checked(channel(f"mailto:{address}")), addresses) == []
