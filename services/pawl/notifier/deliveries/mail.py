"""Deliveries as mail: messages with always the same bytes. Whatever users and models wrote in them is only text."""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime
from email.message import EmailMessage
from email.utils import format_datetime
from html import escape
from typing import Final

import msgspec

from pawl.chassis.egress.mail import ENCODED, POLICY
from pawl.chassis.visible import visible
from pawl.notifier.channels.rules import code_of, unsubscribe_token
from pawl.notifier.deliveries.link import unsubscribe_link
from pawl.notifier.deliveries.rules import CODE, TEST, Attempt

_HTML: Final = """\
<!doctype html>
<html>
<body>
<p><b>{title}</b></p>
<div style="white-space: pre-wrap">{body}</div>
{link}<p style="color: #666666; white-space: pre-wrap">{foot}</p>
</body>
</html>
"""


class _Told(msgspec.Struct):
    timestamp: datetime
    data: dict[str, str]


def written(attempt: Attempt, *, sender: str, public_url: str = "") -> bytes:
    """Return the message of a delivery, from an address; with a link that ends such messages, as RFC 8058 has it."""
    told = msgspec.json.decode(attempt.body, type=_Told)
    data, domain = told.data, sender.partition("@")[2]
    title, body, link, foot = texts(attempt)
    unsubscribe = "" if attempt.type == CODE else _unsubscribe_link(attempt, public_url)
    if unsubscribe:
        foot = f"{foot}\nUnsubscribe: {unsubscribe}"
    message = EmailMessage(policy=POLICY)
    message["From"] = f"Pawl <{sender}>"
    message["To"] = attempt.url.removeprefix("mailto:")
    message["Subject"] = title
    message["Date"] = format_datetime(told.timestamp)
    message["Message-ID"] = f"<{attempt.candidate.delivery_id}@{domain}>"
    if conversation_id := data.get("conversation_id"):
        # What is told of a conversation answers the same message, which nobody sent: so it is one thread.
        root = f"<{conversation_id}.{data['store_id']}@{domain}>"
        message["In-Reply-To"] = root
        message["References"] = root
    message["Auto-Submitted"] = "auto-generated"
    message.set_content("\n\n".join(part for part in (title, body, link, f"-- \n{foot}") if part))
    page = _HTML.format(title=escape(title), body=escape(body), link=_anchor(link), foot=_linked(foot, unsubscribe))
    message.add_alternative(page, subtype="html", charset="utf-8")
    # The same for each try, and of nobody's knowing who writes a part of the text.
    message.set_boundary("=_" + hmac.digest(attempt.secrets[0], attempt.body.encode(), hashlib.sha256).hex()[:40])
    return _unsubscribe_headers(unsubscribe) + message.as_bytes()


def _unsubscribe_headers(link: str) -> bytes:
    """Return headers by which mail programs unsubscribe with one click; the library would encode what is so long."""
    lines = [f"List-Unsubscribe: <{link}>"] if link else []
    if link.startswith("https:"):
        lines.append("List-Unsubscribe-Post: List-Unsubscribe=One-Click")
    return "".join(f"{line}\r\n" for line in lines).encode()


def _unsubscribe_link(attempt: Attempt, public_url: str) -> str:
    store_id, channel_id = attempt.candidate.inbox.store_id, attempt.candidate.channel_id
    token = unsubscribe_token(attempt.secrets[0], store_id, channel_id, attempt.url)
    return unsubscribe_link(public_url, store_id, token)


def texts(attempt: Attempt) -> tuple[str, str, str, str]:
    """Return the title, the text, the link and the end of a message; without one the link is empty."""
    data = msgspec.json.decode(attempt.body, type=_Told).data
    whose = f"{data['user_id']} of the store {data['store_id']}"
    channel_id = attempt.candidate.channel_id
    if attempt.type == CODE:
        code = code_of(attempt.secrets[0], attempt.url)
        body = f"{code}\n\nIf that is you, confirm it within an hour:\n\npawl notify confirm {channel_id} {code}"
        foot = f"{whose} asked for notifications at this address. If not you, do nothing."
        return "Confirm your address", body, "", foot
    ids = [f"{name}: {data[f'{name}_id']}" for name in ("run", "call", "conversation") if data.get(f"{name}_id")]
    end = f"For {whose}. To get no more of these: pawl notify delete {channel_id}"
    title = "Test" if attempt.type == TEST else _line(data.get("title", ""))
    return title, visible(data.get("body", "")), data.get("url", ""), "\n".join([*ids, end])


def _linked(text: str, link: str) -> str:
    """Return a text as HTML, in which a link of ours is one; none is, where it is empty."""
    shown = escape(text)
    return shown.replace(escape(link), f'<a href="{escape(link)}">{escape(link)}</a>') if link else shown


def _anchor(link: str) -> str:
    return f"<p>{_linked(link, link)}</p>\n" if link else ""


def _line(text: str) -> str:
    """Return a text for a header."""
    return " ".join(visible(text).split()).replace(ENCODED, "= ?")
