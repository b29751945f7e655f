"""Sends deliveries as signed webhook requests (Standard Webhooks specification) and e-mails."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime
from html import escape
from typing import Final

import aiosmtplib
import msgspec
from standardwebhooks.webhooks import Webhook as Signature

from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.retry import asked_seconds
from pawl.chassis.rpc.trace_context import TRACEPARENT_KEY
from pawl.chassis.visible import visible
from pawl.notifier.channels.rules import code_of, unsubscribe_token
from pawl.notifier.deliveries.rules import CODE, TEST, Attempt, DeliveryId, Outcome, unsubscribe_link
from pawl.server.egress.client import Egress, OutboundRequest, RequestFailed
from pawl.server.egress.mail import ENCODED, POLICY, SmtpServer
from pawl.server.egress.policy import EgressRefused

TRY_SECONDS: Final = 15.0


class SignedPosts:
    """Sends webhooks, and reads only the status and the Retry-After header of each response. See `ChannelSender`."""

    def __init__(self, egress: Egress, clock: Clock) -> None:
        self._egress = egress
        self._clock = clock
        self._lookups: dict[DeliveryId, asyncio.Future[Sequence[str]]] = {}

    async def send(self, attempt: Attempt) -> Outcome:
        store_id = attempt.candidate.inbox.store_id
        request = OutboundRequest(
            url=attempt.url,
            method="POST",
            headers=self._headers(attempt),
            body=attempt.body.encode(),
            timeout_seconds=TRY_SECONDS,
            bytes_max=0,
        )
        started = self._clock.monotonic()
        try:
            self._egress.check(store_id, attempt.url, with_secrets=True)
            response = await self._egress.send(store_id, request)
        except EgressRefused as refused:
            return Outcome(error=f"the deployment's egress rules forbid it: {refused}")
        except RequestFailed as failed:
            if failed.lookup is not None:
                self._lookups[attempt.candidate.delivery_id] = failed.lookup
            return Outcome(error=str(failed), latency_seconds=self._clock.monotonic() - started)
        return Outcome(
            status=response.status,
            latency_seconds=self._clock.monotonic() - started,
            retry_after_seconds=asked_seconds(response.retry_after, now=self._clock.now()),
        )

    async def finish(self, attempt: Attempt) -> None:
        lookup = self._lookups.pop(attempt.candidate.delivery_id, None)
        if lookup is not None:
            await asyncio.wait({lookup})

    def _headers(self, attempt: Attempt) -> dict[str, str]:
        now = datetime.fromtimestamp(int(self._clock.now()), UTC)
        message_id = attempt.candidate.delivery_id
        signatures = (Signature(secret).sign(message_id, now, attempt.body) for secret in attempt.secrets)
        context = msgspec.json.decode(attempt.body, type=_Payload).data.get(TRACEPARENT_KEY)
        return {
            **({TRACEPARENT_KEY: context} if context else {}),
            "Content-Type": "application/json",
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(signatures),
        }


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


class _Payload(msgspec.Struct):
    timestamp: datetime
    data: dict[str, str]


def email_message(attempt: Attempt, *, sender: str, public_url: str = "") -> bytes:
    """Return the e-mail for a delivery. With a `public_url`, it includes an unsubscribe link (RFC 8058)."""
    payload = msgspec.json.decode(attempt.body, type=_Payload)
    data, domain = payload.data, sender.partition("@")[2]
    title, body, link, foot = texts(attempt)
    unsubscribe = "" if attempt.type == CODE else _unsubscribe_link(attempt, public_url)
    if unsubscribe:
        foot = f"{foot}\nUnsubscribe: {unsubscribe}"
    message = EmailMessage(policy=POLICY)
    message["From"] = f"Pawl <{sender}>"
    message["To"] = attempt.url.removeprefix("mailto:")
    message["Subject"] = title
    message["Date"] = format_datetime(payload.timestamp)
    message["Message-ID"] = f"<{attempt.candidate.delivery_id}@{domain}>"
    if conversation_id := data.get("conversation_id"):
        # All of a conversation's e-mails reply to the same message, which was never sent, so that they form one thread.
        root = f"<{conversation_id}.{data['store_id']}@{domain}>"
        message["In-Reply-To"] = root
        message["References"] = root
    message["Auto-Submitted"] = "auto-generated"
    message.set_content("\n\n".join(part for part in (title, body, link, f"-- \n{foot}") if part))
    paragraph = f"<p>{_linked(link, link)}</p>\n" if link else ""
    page = _HTML.format(title=escape(title), body=escape(body), link=paragraph, foot=_linked(foot, unsubscribe))
    message.add_alternative(page, subtype="html", charset="utf-8")
    # The same for every attempt. Keyed, so that untrusted text cannot contain the boundary.
    message.set_boundary("=_" + hmac.digest(attempt.secrets[0], attempt.body.encode(), hashlib.sha256).hex()[:40])
    return _unsubscribe_headers(unsubscribe) + message.as_bytes()


def _unsubscribe_headers(link: str) -> bytes:
    """Return the headers for one-click unsubscribing, unencoded, because EmailMessage would encode long values."""
    lines = [f"List-Unsubscribe: <{link}>"] if link else []
    if link.startswith("https:"):
        lines.append("List-Unsubscribe-Post: List-Unsubscribe=One-Click")
    return "".join(f"{line}\r\n" for line in lines).encode()


def _unsubscribe_link(attempt: Attempt, public_url: str) -> str:
    store_id, channel_id = attempt.candidate.inbox.store_id, attempt.candidate.channel_id
    token = unsubscribe_token(attempt.secrets[0], store_id, channel_id, attempt.url)
    return unsubscribe_link(public_url, store_id, token)


def texts(attempt: Attempt) -> tuple[str, str, str, str]:
    """Return a message's title, text, link and footer. The link may be empty."""
    data = msgspec.json.decode(attempt.body, type=_Payload).data
    whose = f"{data['user_id']} of the store {data['store_id']}"
    channel_id = attempt.candidate.channel_id
    if attempt.type == CODE:
        code = code_of(attempt.secrets[0], attempt.url)
        body = f"{code}\n\nIf that is you, confirm it within an hour:\n\npawl notify confirm {channel_id} {code}"
        foot = f"{whose} asked for notifications at this address. If that was not you, ignore this e-mail."
        return "Confirm your address", body, "", foot
    ids = [f"{name}: {data[f'{name}_id']}" for name in ("run", "call", "conversation") if data.get(f"{name}_id")]
    end = f"For {whose}. To stop receiving these: pawl notify delete {channel_id}"
    title = "Test" if attempt.type == TEST else " ".join(visible(data.get("title", "")).split())
    title = title.replace(ENCODED, "= ?")
    return title, visible(data.get("body", "")), data.get("url", ""), "\n".join([*ids, end])


def _linked(text: str, link: str) -> str:
    shown = escape(text)
    return shown.replace(escape(link), f'<a href="{escape(link)}">{escape(link)}</a>') if link else shown


_FINAL: Final = range(500, 600)


class Emails:
    """Sends e-mails. A message accepted by the mail server counts as delivered. See `ChannelSender`.

    Messages have an unsubscribe link if there is a `public_url`.
    """

    def __init__(self, server: SmtpServer | None, sender: str, clock: Clock, public_url: str = "") -> None:
        self._server = server
        self._sender = sender
        self._clock = clock
        self._public_url = public_url

    async def send(self, attempt: Attempt) -> Outcome:
        if self._server is None:
            return Outcome(error="the deployment no longer has a mail server", is_receivers=False)
        started = self._clock.monotonic()
        outcome = await self._sent(self._server, attempt)
        return replace(outcome, latency_seconds=self._clock.monotonic() - started)

    async def finish(self, attempt: Attempt) -> None:
        """Return immediately, because attempts leave no background work."""

    async def _sent(self, server: SmtpServer, attempt: Attempt) -> Outcome:
        recipient = attempt.url.removeprefix("mailto:")
        message = email_message(attempt, sender=self._sender, public_url=self._public_url)
        try:
            await server.send(message, sender=self._sender, recipients=[recipient], seconds=TRY_SECONDS)
        except aiosmtplib.SMTPRecipientsRefused as refused:
            return _refusal(refused.recipients[0].code, "the address")
        except aiosmtplib.SMTPDataError as refused:
            return _refusal(refused.code, "the message")
        except aiosmtplib.SMTPResponseException as refused:
            # The server refused before any recipient was named, so it refuses this sender.
            return Outcome(error=f"the mail server refused with code {refused.code}", is_receivers=False)
        except (aiosmtplib.SMTPException, OSError) as error:
            # The message may have been accepted.
            problem = f"the mail server could not be reached or stopped responding ({type(error).__name__})"
            return Outcome(error=problem, is_receivers=False)
        return Outcome(status=250)


def _refusal(code: int, what: str) -> Outcome:
    return Outcome(status=code, error=f"the mail server refused {what} with code {code}", is_final=code in _FINAL)
