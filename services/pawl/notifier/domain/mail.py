"""Deliveries as mail: messages with always the same bytes. Whatever users and models wrote in them is only text."""

from __future__ import annotations

import hashlib
import hmac
from datetime import datetime
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from html import escape
from typing import Final

import msgspec

from pawl.chassis.mail import ENCODED
from pawl.notifier.domain.channel import code_of
from pawl.notifier.domain.delivery import CODE, TEST, Attempt

# Whatever a server between us and the reader can carry.
_POLICY: Final = SMTP.clone(cte_type="7bit")
_HTML: Final = """\
<!doctype html>
<html>
<body>
<p><b>{title}</b></p>
<div style="white-space: pre-wrap">{body}</div>
<p style="color: #666666; white-space: pre-wrap">{foot}</p>
</body>
</html>
"""


class _Told(msgspec.Struct):
    timestamp: datetime
    data: dict[str, str]


def written(attempt: Attempt, *, sender: str) -> bytes:
    """Return the message of a delivery, from an address."""
    told = msgspec.json.decode(attempt.body, type=_Told)
    data, domain = told.data, sender.partition("@")[2]
    title, body, foot = texts(attempt)
    message = EmailMessage(policy=_POLICY)
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
    message.set_content("\n\n".join(part for part in (title, body, f"-- \n{foot}") if part))
    message.add_alternative(
        _HTML.format(title=escape(title), body=escape(body), foot=escape(foot)), subtype="html", charset="utf-8"
    )
    # The same for each try, and of nobody's knowing who writes a part of the text.
    message.set_boundary("=_" + hmac.digest(attempt.secrets[0], attempt.body.encode(), hashlib.sha256).hex()[:40])
    return message.as_bytes()


def texts(attempt: Attempt) -> tuple[str, str, str]:
    """Return the title, the text and the end of a message."""
    data = msgspec.json.decode(attempt.body, type=_Told).data
    whose = f"{data['user_id']} of the store {data['store_id']}"
    channel_id = attempt.candidate.channel_id
    if attempt.type == CODE:
        code = code_of(attempt.secrets[0], attempt.url)
        body = f"{code}\n\nIf that is you, confirm it within an hour:\n\npawl notify confirm {channel_id} {code}"
        return "Confirm your address", body, f"{whose} asked for notifications at this address. If not you, do nothing."
    ids = [f"{name}: {data[f'{name}_id']}" for name in ("run", "call", "conversation") if data.get(f"{name}_id")]
    end = f"For {whose}. To get no more of these: pawl notify delete {channel_id}"
    title = "Test" if attempt.type == TEST else _line(data.get("title", ""))
    return title, _seen(data.get("body", "")), "\n".join([*ids, end])


def _line(text: str) -> str:
    """Return a text for a header."""
    return " ".join(_seen(text).split()).replace(ENCODED, "= ?")


def _seen(text: str) -> str:
    """Return a text without what cannot be seen: a header, and a line, end where we say so."""
    whole = text.replace("\r\n", "\n")
    return "".join(each if each.isprintable() or each in "\n\t" else " " * each.isspace() for each in whole)
