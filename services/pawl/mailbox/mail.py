"""Parses a message, and decides whether it may fire the trigger. All content is untrusted."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from email import message_from_bytes, policy
from email.message import EmailMessage
from typing import Any, Final, cast

TEXT_BYTES_MAX: Final = 128 * 1024
PARTS_MAX: Final = 100
ATTACHMENTS_MAX: Final = 20
# A longer thread is assumed to be two programs answering each other.
THREAD_MAILS_MAX: Final = 40
_HEADER_CHARACTERS_MAX: Final = 998
_RESULTS_MAX: Final = 8192
_FILE_NAME_CHARACTERS_MAX: Final = 90
_BULK: Final = frozenset({"bulk", "list", "junk", "auto_reply"})
_TEXTS: Final = frozenset({"text/plain", "text/markdown", "text/csv", "text/calendar", "application/json"})

# Only addresses that all parsers read in the same way: no comments, quotes, groups or lists.
_ADDRESS: Final = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){0,10}")
_FROM: Final = re.compile(
    rf"""\s*(?:(?:"[^"\\<>]*"[ \t]*|[^"<>,;:@\\()]*)<(?P<angle>{_ADDRESS.pattern})>|(?P<bare>{_ADDRESS.pattern}))\s*"""
)
_MESSAGE_ID: Final = re.compile(r"<[!-;=?-~]{1,250}>")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
# Parsers disagree about lines that are not headers and about lone carriage returns, so both are refused.
_HEADERS: Final = re.compile(
    rb"(?:From [^\r\n]*\r?\n)?(?:[!-9;-~]+:[^\r\n]*(?:\r?\n|\Z)(?:[ \t][^\r\n]*(?:\r?\n|\Z))*)*(?:\r?\n|\Z)"
)


def read_mail(raw: bytes, is_cut: bool, *, own: str, authserv_id: str, senders: Sequence[str]) -> dict[str, Any]:  # noqa: FBT001
    """Return a message's data and the texts of its attachments.

    If the message may not fire the trigger, return only the reason, as `refusal`. `own` is the address of the mailbox.
    `is_cut` means that `raw` is only the first part of the message.
    """
    try:
        message = message_from_bytes(raw, policy=policy.default)
        found = _raw(message, "From")
        match = _FROM.fullmatch(re.sub(r"[\r\n]", "", found[0])) if len(found) == 1 else None
        sender = (match["angle"] or match["bare"]).lower() if match else ""
        refusal = "" if _HEADERS.match(raw) else "its headers are ambiguous"
        refusal = refusal or _automatic(message) or _unwanted(message, sender, own, authserv_id, senders)
        return {"refusal": refusal} if refusal else {"from": sender, **_headers(message), **_contents(message, is_cut)}
    except Exception:  # noqa: BLE001  # one bad mail must not block the following ones
        return {"refusal": "it cannot be parsed"}


def _raw(message: EmailMessage, name: str) -> list[str]:
    return [str(value)[:_RESULTS_MAX] for each, value in message.raw_items() if each.lower() == name.lower()]


def _automatic(message: EmailMessage) -> str:
    """Return why a message must not be answered automatically (RFC 3834), or an empty string if it may be."""
    if message.get_content_type() == "multipart/report":
        return "it is an automatic email: multipart/report"
    for name in ("List-Id", "X-Autoreply", "X-Autorespond"):
        if name in message:
            return f"it is an automatic email: {name}"
    for name in ("Auto-Submitted", "X-Auto-Response-Suppress", "Precedence", "Return-Path"):
        for value in _raw(message, name):
            word = _without_comments(value).partition(";")[0].strip().lower()
            is_automatic = {"Precedence": word in _BULK, "Return-Path": word == "<>"}
            if is_automatic.get(name, word not in {"", "no", "none"}):
                return f"it is an automatic email: {name}: {_clean(word)[:40]}"
    if len(_ids(message, "References")) >= THREAD_MAILS_MAX:
        return f"its thread has more than {THREAD_MAILS_MAX} messages"
    return ""


def _unwanted(message: EmailMessage, sender: str, own: str, authserv_id: str, senders: Sequence[str]) -> str:
    if not sender:
        return "its sender is not one plain address"
    if sender == own.lower():
        return f"it is from the mailbox itself, {sender}"
    domain = sender.rpartition("@")[2]
    if senders and not {sender, f"@{domain}"} & {each.lower() for each in senders}:
        return f"{sender} is not one of the allowed senders"
    if authserv_id and not _passes(message, authserv_id.lower(), domain):
        return f"{authserv_id} does not report a DMARC pass for {domain}"
    return ""


def _passes(message: EmailMessage, authserv_id: str, domain: str) -> bool:
    """Return whether the receiving server reports a DMARC pass for the sender's domain (RFC 8601, RFC 7489).

    Only the server's topmost result counts, because the sender may have forged the results below it.
    """
    for value in _raw(message, "Authentication-Results"):
        name, *results = _without_comments(value).lower().split(";")
        if name.split()[:1] != [authserv_id]:
            continue
        about = [each for each in results if re.match(r"\s*dmarc\s*(/\s*1\s*)?=|\s*dmarc$", each)]
        pairs = re.findall(r"([a-z.]+)\s*(?:/\s*1\s*)?=\s*([^\s=]+)", "".join(about))
        verdicts, domains = ({value for each, value in pairs if each == name} for name in ("dmarc", "header.from"))
        return len(about) == 1 and verdicts == {"pass"} and domains <= {domain}
    return False


def _without_comments(text: str) -> str:
    """Return a structured header without comments and quoted strings, or "" if one of these is not closed."""
    outside: list[str] = []
    depth, is_quoted = 0, False
    for piece in re.findall(r"\\.|.", text, re.DOTALL):
        if is_quoted or (piece == '"' and not depth):
            is_quoted = not is_quoted or piece != '"'
        elif piece in "()":
            depth = max(0, depth + (1 if piece == "(" else -1))
        elif not depth and not piece.startswith("\\"):
            outside.append(piece)
    return "" if depth or is_quoted else "".join(outside)


def _ids(message: EmailMessage, *names: str) -> list[str]:
    return _MESSAGE_ID.findall(" ".join(value for name in names for value in _raw(message, name)))


def _headers(message: EmailMessage) -> dict[str, str]:
    own, thread = _ids(message, "Message-ID"), _ids(message, "References", "In-Reply-To", "Message-ID")
    addresses = getattr(_parsed(message, "From"), "addresses", ())
    fields = {name.lower(): str(_parsed(message, name)) for name in ("To", "Cc", "Subject", "Date")}
    fields |= {"from_name": addresses[0].display_name if addresses else "", "message_id": own[0] if own else ""}
    if thread:
        fields["thread"] = thread[0]
    return {name: _clean(value)[:_HEADER_CHARACTERS_MAX] for name, value in fields.items()}


def _parsed(message: EmailMessage, name: str) -> object:
    """Return a decoded header. Unencoded bytes are read as UTF-8 (RFC 6532)."""
    value = next(iter(_raw(message, name)), "")[: 4 * _HEADER_CHARACTERS_MAX]
    return policy.default.header_fetch_parse(name, value.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


def _contents(message: EmailMessage, is_cut: bool) -> dict[str, Any]:  # noqa: FBT001
    texts: dict[str, list[str]] = {"text/plain": [], "text/html": []}
    attachments: list[dict[str, Any]] = []
    left_out = 0
    for number, part in enumerate(_leaves(message)):
        kind = _clean(part.get_content_type())[:100]
        is_file = part.is_attachment() or part.get_filename() is not None
        if number >= PARTS_MAX or (is_file and len(attachments) >= ATTACHMENTS_MAX):
            left_out += 1
        elif is_file or kind not in texts:
            attachments.append(_attachment(part, kind, is_cut))
        else:
            texts[kind].append(_text(part))
    plain = "\n".join(texts["text/plain"])
    text = plain if plain.strip() else "\n".join(map(_words, texts["text/html"]))
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    shown = text.encode()[:TEXT_BYTES_MAX].decode("utf-8", "ignore")
    cut = {"cut": True} if is_cut or left_out or shown != text else {}
    return {"text": shown, "attachments": attachments, **cut}


def _leaves(part: EmailMessage) -> Iterator[EmailMessage]:
    """Yield the leaf parts in order. An attached message counts as one file."""
    if part.get_content_maintype() == "multipart" and part.is_multipart():
        for each in cast("list[EmailMessage]", part.get_payload()):
            yield from _leaves(each)
    else:
        yield part


def _attachment(part: EmailMessage, kind: str, is_cut: bool) -> dict[str, Any]:  # noqa: FBT001
    name = re.sub(r"[^\w. -]", "_", _clean(part.get_filename() or "")).strip(". _")[-_FILE_NAME_CHARACTERS_MAX:]
    payload = part.get_payload(decode=True)
    described: dict[str, Any] = {"name": name or "unnamed", "type": kind}
    if isinstance(payload, bytes):  # An attached message has no payload.
        described["size_bytes"] = len(payload)
    if kind in _TEXTS and not is_cut:
        return {**described, "text": _text(part)} if payload else described
    return {**described, "left_out": "the message is too large" if kind in _TEXTS else "it is not text"}


def _text(part: EmailMessage) -> str:
    payload = cast("bytes", part.get_payload(decode=True) or b"")
    try:
        return _clean(payload.decode(str(part.get_content_charset("utf-8")), "replace"))
    except (LookupError, ValueError):
        return _clean(payload.decode("utf-8", "replace"))


def _clean(text: str) -> str:
    return _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n")).encode("utf-8", "replace").decode()


def _words(page: str) -> str:
    page = re.sub(r"(?is)<(script|style|head|title)\b.*?</\1\s*>", "", page)
    page = re.sub(r"(?i)<(?:br|p|div|tr|li|h[1-3]|table|blockquote)\b[^<>]*>", "\n", re.sub(r"\s+", " ", page))
    return html.unescape(re.sub(r"<[^<>]*>", "", page))
