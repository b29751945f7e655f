"""Incoming e-mails: the sender must be allowed, and parsed content stays within limits."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pawl.mailbox.mail import ATTACHMENTS_MAX, PARTS_MAX, TEXT_BYTES_MAX, THREAD_MAILS_MAX, read_mail
from tests.tables import for_each

ANN: dict[str, Any] = {"own": "pawl", "authserv_id": "", "senders": ["ann@example.com"]}
MX: dict[str, Any] = {"own": "pawl", "authserv_id": "mx.example.net", "senders": []}
PLAIN = "From: Ann <ann@example.com>\nSubject: hi\n\nhello\n"


def read(mail: str | bytes, counts: dict[str, Any] = ANN, *, is_cut: bool = False) -> dict[str, Any]:
    return {"refusal": "", **read_mail(mail.encode() if isinstance(mail, str) else mail, is_cut, **counts)}


@for_each(
    ("sender", "counts"),
    [
        ("ann@example.com", True),
        ("Ann <ANN@Example.com>", True),
        ('"Ann, of the shop" <ann@example.com>', True),
        ("=?utf-8?q?=C3=84nn?= <ann@example.com>", True),
        ("Ann\n <ann@example.com>", True),
        ("bob@example.com", False),
        ("ann@example.com <bob@evil.example>", False),
        ("ann@example.com, bob@evil.example", False),
        ("bob@evil.example, ann@example.com", False),
        ("ann@example.com)bob@evil.example", False),
        ("(ann@example.com) bob@evil.example", False),
        ('"<ann@example.com>" <bob@evil.example>', False),
        ("Ann <ann@example.com> <bob@evil.example>", False),
        ("friends: ann@example.com;", False),
        ("<@evil.example:ann@example.com>", False),
        ("ann@example.com\nFrom: bob@evil.example", False),
        ("ann@example.com\0", False),
        ("", False),
    ],
)
def test_an_email_is_accepted_if_its_only_sender_is_listed(sender: str, counts: bool) -> None:
    mail = read(f"From: {sender}\n\nhello")
    assert (mail["refusal"] == "") is counts, mail
    assert (mail.get("text") == "hello") is counts


def test_a_sender_domain_may_be_listed() -> None:
    assert not read(PLAIN, ANN | {"senders": ["@example.com"]})["refusal"]
    assert read(PLAIN, ANN | {"senders": ["@ample.com"]})["refusal"]
    assert read(PLAIN.replace("@example.com", "@sub.example.com"), ANN | {"senders": ["@example.com"]})["refusal"]


@for_each(
    ("headers", "is_automatic"),
    [
        ("Auto-Submitted: auto-replied; owner-email=x@example.com", True),
        ("Auto-Submitted: (vacation) auto-generated", True),
        ("Auto-Submitted: No", False),
        ("X-Auto-Response-Suppress: All", True),
        ("X-Auto-Response-Suppress: None", False),
        ("Precedence: Bulk", True),
        ("Precedence: first-class", False),
        ("List-Id: Friends <friends.example.com>", True),
        ("Return-Path: <>", True),
        ("Return-Path: <ann@example.com>", False),
        ("Content-Type: multipart/report; boundary=b", True),
        ("References: " + "<a@b>\n " * (THREAD_MAILS_MAX - 1), False),
        ("References: " + "<a@b>\n " * THREAD_MAILS_MAX, True),
        ("Reply-To: pawl@example.net", False),
    ],
)
def test_an_automatic_email_is_refused(headers: str, is_automatic: bool) -> None:
    refusal = read(f"{headers.strip()}\n{PLAIN}")["refusal"]
    assert ("automatic" in refusal or "thread" in refusal) is is_automatic, refusal


def test_an_email_from_the_mailbox_itself_is_refused() -> None:
    assert "itself" in read(PLAIN, MX | {"own": "Ann@example.com"})["refusal"]


@for_each(
    "head",
    [
        b"Subject: hi\rFrom: ann@example.com\r\rhello\r\nFrom: bob@evil.example\r\n",
        b"Subject: hi\rFrom: ann@example.com\r\nX-Real: bob@evil.example\r\n",
        b"Subject: hi\rAuthentication-Results: mx.example.net; dmarc=pass\r\nFrom: ann@example.com\r\n",
        b"From: ann@example.com\r\nFrom : bob@evil.example\r\n",
        b"From: ann@example.com\r\nnone\r\nFrom: bob@evil.example\r\n",
        b"From: ann@example.com\r\n: nothing\r\nFrom: bob@evil.example\r\n",
    ],
)
def test_an_email_with_ambiguous_headers_is_refused(head: bytes) -> None:
    """The receiving server may have checked another sender, or may not have seen some of the headers."""
    for senders, before in ((ANN, b""), (MX, b"Authentication-Results: mx.example.net; dmarc=pass\r\n")):
        mail = read(before + head + b"\r\nhello", senders)
        assert "ambiguous" in mail["refusal"], mail
    assert not read(b"From: ann@example.com\r\n\r\nold\rline ends\r")["refusal"], "they are harmless in a body"


@for_each(
    ("results", "passes"),
    [
        (["mx.example.net; dmarc=pass header.from=example.com"], True),
        (["mx.example.net 1; spf=fail; dmarc=PASS (p=none dis=none) header.from=example.com; dkim=fail"], True),
        (["mx.example.net;\n dkim=pass;\n\tdmarc=pass"], True),
        (["other.example; dmarc=fail", "mx.example.net; dmarc=pass"], True),
        (["mx.example.net; dmarc = pass"], True),
        (["MX.Example.NET; dmarc=pass"], True),
        (["mx.example.net; dmarc=fail header.from=example.com dmarc=pass"], False),
        (["mx.example.net; dmarc=pass header.from=other.example header.from=example.com"], False),
        (["mx.example.net; dmarc=fail header.from=example.com"], False),
        (["mx.example.net; dmarc=none"], False),
        (["mx.example.net; dmarc=pass header.from=other.example"], False),
        (["mx.example.net; spf=pass"], False),
        (["mx.example.net; none"], False),
        (["evil.example; dmarc=pass"], False),
        (["mx.example.net.evil.example; dmarc=pass"], False),
        # The sender wrote the lower header.
        (["mx.example.net; dmarc=fail", "mx.example.net; dmarc=pass"], False),
        (["mx.example.net; spf=pass", "mx.example.net; dmarc=pass"], False),
        (["mx.example.net; dmarc=fail; dmarc=pass"], False),
        (["mx.example.net; dmarc=fail (; dmarc=pass)"], False),
        (['mx.example.net; dmarc=fail reason="; dmarc=pass"'], False),
        (["mx.example.net; spf=pass smtp.mailfrom=dmarc=pass"], False),
        (["(mx.example.net; dmarc=pass"], False),
        (["mx.example.net"], False),
        ([], False),
    ],
)
def test_only_the_receiving_servers_dmarc_result_counts(results: list[str], passes: bool) -> None:
    headers = "".join(f"Authentication-Results: {result}\n" for result in results)
    mail = read(f"{headers}{PLAIN}", MX)
    assert (mail["refusal"] == "") is passes, mail
    assert read(f"{headers}{PLAIN}", MX | {"senders": ["@other.example"]})["refusal"]


def test_an_email_is_read_with_its_headers_and_text() -> None:
    mail = read(
        "From: =?utf-8?q?=C3=84nn?= <ann@example.com>\nTo: bob@example.net\nSubject: =?iso-8859-1?Q?Gr=FC=DFe?=\n"
        "Date: Mon, 23 Nov 2026 21:00:00 +0000\nMessage-ID: <3@x>\nReferences: <1@x>\n <2@x>\nIn-Reply-To: <2@x>\n"
        "Content-Type: text/plain; charset=iso-8859-1\nContent-Transfer-Encoding: quoted-printable\n\nGr=FC=DFe\r\n\0\n"
    )
    assert mail == {
        "refusal": "",
        "from": "ann@example.com",
        "from_name": "Änn",
        "to": "bob@example.net",
        "cc": "",
        "subject": "Grüße",
        "date": "Mon, 23 Nov 2026 21:00:00 +0000",
        "message_id": "<3@x>",
        "thread": "<1@x>",
        "text": "Grüße",
        "attachments": [],
    }


def test_headers_in_utf_8_without_an_encoding_are_read() -> None:
    mail = read("From: Änn <ann@example.com>\nSubject: Grüße aus 東京\nTo: Bärbel <b@example.net>\n\nhello\n")
    assert (mail["refusal"], mail["from"]) == ("", "ann@example.com")
    headers_read = {name: mail[name] for name in ("from_name", "subject", "to")}
    assert headers_read == {"from_name": "Änn", "subject": "Grüße aus 東京", "to": "Bärbel <b@example.net>"}
    assert read(b"From: ann@example.com\nSubject: Gr\xfc\xdfe\n\nhello\n")["subject"] == "Gr\ufffd\ufffde"
    both = read("From: ann@example.com\nSubject: =?utf-8?q?caf=C3=A9?= déjà 東京 =?iso-8859-1?q?vu=21?=\n\nhello\n")
    assert both["subject"] == "café déjà 東京 vu!"
    both = read("From: ann@example.com\nSubject: é C:\\users\\u0041 =?utf-8?q?a\\b?=\n\nhello\n")
    assert both["subject"] == "é C:\\users\\u0041 a\\b"


@for_each(
    ("text", "is_cut"),
    [
        ("a" * TEXT_BYTES_MAX, False),
        ("a" * (TEXT_BYTES_MAX + 1), True),
        ("ä" * (TEXT_BYTES_MAX // 2 + 1), True),
        ("a" + "\n" * 1000 + "b", False),
    ],
)
def test_truncated_text_is_marked_as_truncated(text: str, is_cut: bool) -> None:
    """Runs of blank lines are reduced to one line, and that does not count as truncation."""
    mail = read(f"From: ann@example.com\nContent-Type: text/plain; charset=utf-8\n\n{text}\n")
    assert ("cut" in mail, len(mail["text"].encode()) <= TEXT_BYTES_MAX) == (is_cut, True)


def of_parts(*parts: str, kind: str = "mixed") -> str:
    body = "".join(f"--b\n{part}\n" for part in parts)
    return f"From: ann@example.com\nContent-Type: multipart/{kind}; boundary=b\n\n{body}--b--\n"


def test_plain_text_is_preferred_to_html_and_files_are_listed() -> None:
    plain, page = "Content-Type: text/plain\n\nplain", "Content-Type: text/html\n\n<p>a<script>x()</script>&lt;b"
    assert read(of_parts(plain, page, kind="alternative"))["text"] == "plain"
    assert read(of_parts(page))["text"] == "a<b"
    mail = read(
        of_parts(
            plain,
            'Content-Type: text/csv; name="x"\nContent-Disposition: attachment; filename="../../a;b.csv"\n\n1,2',
            "Content-Type: application/pdf\nContent-Transfer-Encoding: base64\n\nAAAA",
            "Content-Type: message/rfc822\n\nSubject: inner\n\ninner",
        )
    )
    csv, pdf, inner = mail["attachments"]
    assert csv == {"name": "a_b.csv", "type": "text/csv", "size_bytes": 3, "text": "1,2"}
    assert pdf == {"name": "unnamed", "type": "application/pdf", "size_bytes": 3, "left_out": "it is not text"}
    assert (inner["type"], inner["left_out"]) == ("message/rfc822", "it is not text")
    cut = read(of_parts(plain, 'Content-Type: text/csv; name="x.csv"\n\n1,2'), is_cut=True)
    assert (cut["cut"], cut["attachments"][0]["left_out"]) == (True, "the message is too large")


@for_each(
    "headers",
    [
        "".join(f"Content-Type: multipart/mixed; boundary=b{n}\n\n--b{n}\n" for n in range(2000)),
        "Content-Type: name;charset*0*\n\n",
    ],
)
def test_an_email_that_breaks_the_parser_is_skipped(headers: str) -> None:
    assert read("From: ann@example.com\n" + headers)["refusal"] == "it cannot be parsed"


def test_hostile_emails_stay_within_limits() -> None:
    deep = "".join(f"Content-Type: multipart/mixed; boundary=b{n}\n\n--b{n}\n" for n in range(60))
    hostile = [
        "From: ann@example.com\n" + deep + "x",
        of_parts(*["Content-Type: text/plain\n\na"] * 300),
        of_parts(*['Content-Type: text/csv; name="a"\n\n1'] * 90),
        "From: ann@example.com\nSubject: " + "=?utf-8?q?a?= " * 20_000 + "\n\nx",
        "From: ann@example.com\nReferences: " + "<a@b> " * 50_000 + "\n\nx",
        "From: " + "(" * 100_000 + "\n\nx",
        "From: ann@example.com\nContent-Type: text/html\n\n" + "<" * 200_000,
        "From: ann@example.com\nContent-Type: text/plain; charset=" + "x" * 1000 + "\n\nx",
        "From: ann@example.com\nContent-Type: text/plain; charset=utf-7\nContent-Transfer-Encoding: base64\n\n===",
        "From: ann@example.com\n\n" + "a" * 900_000,
        "Authentication-Results: " + "(" * 500_000 + "\nFrom: ann@example.com\n\n",
    ]
    started_at = time.process_time()
    for mail in hostile:
        found = read(mail)
        assert len(found.get("text", "").encode()) <= TEXT_BYTES_MAX
        assert len(found.get("attachments", ())) <= ATTACHMENTS_MAX
        assert all(len(found.get(name, "")) <= 1000 for name in ("subject", "to", "thread", "from_name"))
    assert time.process_time() - started_at < 60
    assert read(hostile[1])["cut"]
    assert read(hostile[1])["text"].count("a") == PARTS_MAX
    assert read(hostile[9])["cut"]


@given(st.binary(max_size=2000))
def test_reading_any_bytes_as_an_email_never_fails(raw: bytes) -> None:
    read(raw)
    read(b"From: ann@example.com\n" + raw)


@for_each(
    "header",
    [
        "Content-Type: text/plain; charset*=us-ascii''utf-8",
        "Content-Type: text/plain; charset*0=a; charset*=b",
        "Content-Type: text/plain; charset=idna",
        "Content-Type: text/plain; charset=punycode",
        "Content-Type: text/plain; charset=undefined",
        "Subject: =?utf-8?b?!Q!?=",
    ],
)
def test_any_charset_or_header_can_be_read(header: str) -> None:
    """An unreadable e-mail would block all later e-mails."""
    mail = read(f"From: ann@example.com\n{header}\n\nh\u00e9llo <![CDA[ world\n")
    assert (mail["refusal"], mail["text"]) == ("", "h\u00e9llo <![CDA[ world")
    file = read(f"From: ann@example.com\n{header}\nContent-Disposition: attachment\n\nh\u00e9")["attachments"][0]
    assert file["text"] == "h\u00e9"


def test_attachment_types_have_no_control_characters() -> None:
    """Pawl's JSON rejects NUL, and terminals interpret escape sequences."""
    mail = read(b"From: ann@example.com\nContent-Type: application/x\x00\x1b[2Jy\n\nhello")
    assert [file["type"] for file in mail["attachments"]] == ["application/x[2jy"]
