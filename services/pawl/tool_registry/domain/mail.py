"""Mails that come in: who they are from, whether that counts, and what they say.

Everything here is written by strangers, and read in a helper, which has limits of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email import message_from_bytes
from email.errors import MessageError
from email.header import Header, decode_header
from email.message import Message
from html.parser import HTMLParser
from typing import Final

MAIL_BYTES_MAX: Final = 1024 * 1024
TEXT_BYTES_MAX: Final = 128 * 1024
PARTS_MAX: Final = 100
ATTACHMENTS_MAX: Final = 20
CPU_SECONDS: Final = 5.0
"""Processor time for a mail."""
_HEADER_CHARACTERS_MAX: Final = 998
_KIND_CHARACTERS_MAX: Final = 100
_FILE_NAME_CHARACTERS_MAX: Final = 90
"""With the trigger and the mail before it, it is the name of a document."""
_RESULTS_MAX: Final = 8192
THREAD_MAILS_MAX: Final = 40
"""A longer thread is taken for two programs that answer each other."""
_BULK: Final = frozenset({"bulk", "list", "junk", "auto_reply"})

# Of an address only what everybody reads alike: no comments, no quotes, no groups, no lists.
_ADDRESS: Final = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){0,10}")
_FROM: Final = re.compile(
    rf"""\s*(?:(?P<name>"[^"\\<>]*"[ \t]*|[^"<>,;:@\\()]*)<(?P<angle>{_ADDRESS.pattern})>|"""
    rf"""(?P<bare>{_ADDRESS.pattern}))\s*"""
)
_MESSAGE_ID: Final = re.compile(r"<[!-;=?-~]{1,250}>")
_TEXTS: Final = frozenset({"text/plain", "text/markdown", "text/csv", "text/calendar", "application/json"})
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_BLANK_LINES: Final = re.compile(r"\n{3,}")
_UNSAFE: Final = re.compile(r"[^\w. -]")
# Of what is no header, and of a carriage return alone, one reader makes the end of a line, or of all headers, and
# another one does not.
_HEADERS: Final = re.compile(
    rb"(?:From [^\r\n]*\r?\n)?(?:[!-9;-~]+:[^\r\n]*(?:\r?\n|\Z)(?:[ \t][^\r\n]*(?:\r?\n|\Z))*)*(?:\r?\n|\Z)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Senders:
    """The mails that count: those of which the server of that name says that they pass DMARC, and of those senders.

    Mails from `own`, the address of the mailbox, never count.
    """

    authserv_id: str = ""
    senders: tuple[str, ...] = ()
    own: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A file of a mail. It has a text if it is of a kind that can be a document; if not, `left_out` says why."""

    name: str
    type: str
    size_bytes: int
    text: str | None = None
    left_out: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """A mail. `refusal` says why it does not count; then nothing else is read."""

    refusal: str = ""
    sender: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    attachments: tuple[Attachment, ...] = ()
    is_cut: bool = False


def read_mail(raw: bytes, senders: Senders, *, is_cut: bool) -> Mail:
    """Return what a mail says, of which there may be the beginning only."""
    message = message_from_bytes(raw)
    sender = _sender(message)
    refusal = _two_ways(raw) or _automatic(message) or _refusal(message, sender, senders)
    if refusal:
        return Mail(refusal=refusal, sender=sender)
    texts: list[str] = []
    pages: list[str] = []
    attachments: list[Attachment] = []
    left_out = 0
    for number, part in enumerate(_leaves(message)):
        kind = _clean(part.get_content_type().lower())[:_KIND_CHARACTERS_MAX]
        is_file = _filename(part) is not None or part.get_content_disposition() == "attachment"
        if number >= PARTS_MAX or (is_file and len(attachments) >= ATTACHMENTS_MAX):
            left_out += 1
        elif is_file or kind not in {"text/plain", "text/html"}:
            attachments.append(_attachment(part, kind, is_whole=not is_cut))
        else:
            (texts if kind == "text/plain" else pages).append(_text_of(part))
    text = "\n".join(texts) if any(map(str.strip, texts)) else "\n".join(map(_plain, pages))
    whole = _BLANK_LINES.sub("\n\n", text).strip()
    shown = _beginning(whole)
    return Mail(
        sender=sender,
        headers=_headers(message),
        text=shown,
        attachments=tuple(attachments),
        is_cut=is_cut or left_out > 0 or shown != whole,
    )


def _sender(message: Message) -> str:
    """Return the one address that a mail is from; empty if that is not plain."""
    found = message.get_all("From", [])
    match = _FROM.fullmatch(_unfolded(found[0])) if len(found) == 1 else None
    return (match["angle"] or match["bare"]).lower() if match else ""


def _two_ways(raw: bytes) -> str:
    """Return why the server that received a mail may have read other headers than are read here; else nothing."""
    return "" if _HEADERS.match(raw) else "its headers can be read in two ways"


def _automatic(message: Message) -> str:
    """Return why a program, not a person, seems to have sent a mail (RFC 3834); else nothing."""
    if message.get_content_type() == "multipart/report":
        return "it is automatic: multipart/report"
    for name in ("List-Id", "X-Autoreply", "X-Autorespond"):
        if name in message:
            return f"it is automatic: {name}"
    for name in ("Auto-Submitted", "X-Auto-Response-Suppress", "Precedence", "Return-Path"):
        for value in message.get_all(name, []):
            word = _without_comments(str(value)[:_HEADER_CHARACTERS_MAX]).partition(";")[0].strip().lower()
            is_automatic = {"Precedence": word in _BULK, "Return-Path": word == "<>"}
            if is_automatic.get(name, word not in {"", "no", "none"}):
                return f"it is automatic: {name}: {_clean(word)[:40]}"
    if len(_references(message)) >= THREAD_MAILS_MAX:
        return f"its thread has more than {THREAD_MAILS_MAX} mails"
    return ""


def _references(message: Message) -> list[str]:
    return _MESSAGE_ID.findall(" ".join(map(str, message.get_all("References", [])))[:_RESULTS_MAX])


def _refusal(message: Message, sender: str, senders: Senders) -> str:
    if not sender:
        return "its sender is not one plain address"
    if sender == senders.own.lower():
        return f"it is from the mailbox itself, {sender}"
    domain = sender.rpartition("@")[2]
    if senders.senders and not {sender, f"@{domain}"} & {each.lower() for each in senders.senders}:
        return f"{sender} is not among the senders"
    if senders.authserv_id and not _passes(message, senders.authserv_id, domain):
        return f"{senders.authserv_id} does not say that {domain} has passed DMARC"
    return ""


def _passes(message: Message, authserv_id: str, domain: str) -> bool:
    """Return whether the receiving server says that the domain of the sender has passed DMARC (RFC 8601, RFC 7489).

    Only the topmost of its results counts: those below may have come along with the mail.
    """
    for value in message.get_all("Authentication-Results", []):
        name, *results = _without_comments(str(value)[:_RESULTS_MAX]).split(";")
        if name.lower().split()[:1] != [authserv_id.lower()]:
            continue
        found = [result.split() for result in results]
        about = [words for words in found if words and re.match(r"dmarc\s*(/\s*1\s*)?=|dmarc$", words[0].lower())]
        if len(about) != 1:
            return False
        said = re.findall(r"([a-z.]+)\s*(?:/\s*1\s*)?=\s*([^\s=]+)", " ".join(about[0]).lower())
        values = {name: {value for each, value in said if each == name} for name in ("dmarc", "header.from")}
        return values["dmarc"] == {"pass"} and values["header.from"] <= {domain}
    return False


def _without_comments(text: str) -> str:
    """Return a structured header without what is in brackets, or in quotes; nothing if they do not close."""
    kept: list[str] = []
    depth, is_quoted, is_escaped = 0, False, False
    for character in text:
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif is_quoted:
            is_quoted = character != '"'
        elif character == '"' and not depth:
            is_quoted = True
        elif character == "(":
            depth += 1
        elif character == ")" and depth:
            depth -= 1
        elif not depth:
            kept.append(character)
    return "" if depth or is_quoted else "".join(kept)


def _headers(message: Message) -> dict[str, str]:
    match = _FROM.fullmatch(_unfolded(_as_text(message["From"])))
    replied = _MESSAGE_ID.findall(str(message.get("In-Reply-To", ""))[:_HEADER_CHARACTERS_MAX])
    own = _MESSAGE_ID.findall(str(message.get("Message-ID", ""))[:_HEADER_CHARACTERS_MAX])
    thread = next(iter([*_references(message), *replied, *own]), "")
    return {
        "from_name": _decoded(match["name"] or "").strip(' "') if match else "",
        "to": _decoded(message.get("To", "")),
        "cc": _decoded(message.get("Cc", "")),
        "subject": _decoded(message.get("Subject", "")),
        "date": _decoded(message.get("Date", "")),
        "message_id": own[0] if own else "",
        # Mails without one are no thread together.
        **({"thread": thread} if thread else {}),
    }


def _unfolded(value: object) -> str:
    return str(value)[: 4 * _HEADER_CHARACTERS_MAX].replace("\r", "").replace("\n", "")


def _as_text(value: object) -> object:
    """Return a header that has bytes in it, and no encoding, as the UTF-8 that most are (RFC 6532)."""
    if not isinstance(value, Header):
        return value
    pieces = (piece if isinstance(piece, bytes) else piece.encode() for piece, _ in decode_header(value))
    return b"".join(pieces).decode("utf-8", "replace")


def _decoded(value: object) -> str:
    """Return a header as people read it."""
    text = _unfolded(_as_text(value))[:_HEADER_CHARACTERS_MAX]
    # A character for each byte: of others the standard library makes escapes between encoded words.
    said = text.encode("utf-8", "replace").decode("latin-1")
    try:
        pieces = [
            (piece if isinstance(piece, bytes) else piece.encode("latin-1")).decode(charset or "utf-8", "replace")
            for piece, charset in decode_header(said)
        ]
    except (LookupError, ValueError, MessageError):
        return _clean(text)
    return _clean("".join(pieces))


def _filename(part: Message) -> str | None:
    """Return what a part calls its file; None without parameters that can be read."""
    try:
        return part.get_filename()
    except (LookupError, TypeError, ValueError):
        return None


def _charset(part: Message) -> str:
    try:
        return str(part.get_content_charset("utf-8"))
    except (LookupError, TypeError, ValueError):
        return "utf-8"


def _payload(part: Message) -> bytes:
    """Return what a part holds; its parameters are in nobody's way."""
    try:
        payload = part.get_payload(decode=True)
    except (LookupError, TypeError, ValueError):
        # The bytes are the same; for a text they are decoded here.
        del part["Content-Type"]
        payload = part.get_payload(decode=True)
    return payload if isinstance(payload, bytes) else b""


def _leaves(message: Message) -> Iterator[Message]:
    """Yield the parts that have no parts, in order. A mail in a mail is a file."""
    waiting = [message]
    while waiting:
        part = waiting.pop()
        # Only of one with parts: a text may not be there to be asked for.
        payload = part.get_payload() if part.is_multipart() else None
        if part.get_content_maintype() == "multipart" and isinstance(payload, list):
            waiting.extend(each for each in reversed(payload) if isinstance(each, Message))
        else:
            yield part


def _attachment(part: Message, kind: str, *, is_whole: bool) -> Attachment:
    name = _UNSAFE.sub("_", _decoded(_filename(part) or "")).strip(". _")[-_FILE_NAME_CHARACTERS_MAX:]
    size = _size(part)
    text, why = None, ""
    if kind not in _TEXTS:
        why = "it is no text"
    elif not is_whole:
        why = "the mail is too large"
    elif size:
        text = _text_of(part)
    return Attachment(name=name or "unnamed", type=kind, size_bytes=size, text=text, left_out=why)


def _size(part: Message) -> int:
    """Return the size of a file; of a mail in a mail that of all of it, 0 if it cannot be written as it came."""
    if not part.is_multipart():
        return len(_payload(part))
    try:
        return sum(len(each.as_bytes()) for each in part.get_payload() if isinstance(each, Message))
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError, MessageError):
        return 0


def _text_of(part: Message) -> str:
    payload = _payload(part)
    try:
        text = payload.decode(_charset(part), "replace")
    except (LookupError, ValueError):
        text = payload.decode("utf-8", "replace")
    return _clean(text)


def _clean(text: str) -> str:
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub("", plain).encode("utf-8", "replace").decode()


def _beginning(text: str) -> str:
    return text.encode()[:TEXT_BYTES_MAX].decode("utf-8", "ignore")


class _Plain(HTMLParser):
    """Keeps the words of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self._hidden += tag in {"style", "script", "head", "title"}
        if tag in {"br", "p", "div", "tr", "li", "h1", "h2", "h3", "table", "blockquote"}:
            self.words.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in {"style", "script", "head", "title"}))

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.words.append(re.sub(r"\s+", " ", data))


def _plain(page: str) -> str:
    """Return the words of a page, as far as it can be read."""
    reader = _Plain()
    with suppress(AssertionError, ValueError):
        reader.feed(page)
        reader.close()
    return "".join(reader.words)
