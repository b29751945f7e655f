"""The tool that sends e-mail."""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import os
import re
import unicodedata
from datetime import UTC, datetime
from email.errors import MessageError
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

import aiosmtplib
import msgspec

from pawl.chassis.ids import CallId, CallKey, RunId, RunKey, StoreId
from pawl.chassis.labels import MAIL_ID, MAIL_THREAD
from pawl.chassis.process.clock import Clock
from pawl.server.egress.mail import ENCODED, POLICY, SmtpServer
from pawl.tool_registry.documents.store import PostgresDocumentRepository
from pawl.tool_registry.documents.tools import Name, read_one
from pawl.tool_registry.ledger import LedgerReads
from pawl.tools.sdk.context import ToolContext, ToolError
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass

# Maximum for `to` and `cc` together.
RECIPIENTS_MAX: Final = 20
ATTACHMENTS_MAX: Final = 10
# Total size of a message's attachments. Many servers refuse larger messages.
ATTACHMENTS_BYTES_MAX: Final = 5 * 1024 * 1024

# An id as `mailbox` reads it, but without `ENCODED`.
_MESSAGE_ID: Final = r"^(<([!-;?-~]|=+[!-;@-~])+=*>)?$"
MessageIdText = Annotated[str, msgspec.Meta(pattern=_MESSAGE_ID, max_length=252)]
# Printable ASCII without the characters that have a meaning in headers, and without the dot.
_ATOM: Final = "[!#-'*+/-9=?A-Z^-~-]+"
_ADDRESS: Final = rf"^{_ATOM}(\.{_ATOM})*@{_ATOM}(\.{_ATOM})+$"
AddressText = Annotated[
    str,
    msgspec.Meta(
        pattern=_ADDRESS, max_length=254, examples=["ann@example.com"], extra_json_schema={"format": "recipient"}
    ),
]


class Mailer(Protocol):
    async def send(self, message: EmailMessage, recipients: list[str], call: CallKey) -> dict[str, Any]:
        """Send a call's message, and return the fields of the tool's result.

        Raises:
            ToolError: The message was refused, or may not have been sent. The model sees the error's text.
        """


def mail_tools(
    mailer: Mailer, documents: PostgresDocumentRepository, ledger: LedgerReads, clock: Clock, *, sender: str
) -> list[Tool[..., Any]]:
    @tool(
        category=Category.SENSITIVE,
        effect=EffectClass.AT_MOST_ONCE,
        timeout_seconds=60,
        preview=_preview,
        bulk_count=_count,
    )
    async def send_email(
        context: ToolContext,
        to: Annotated[list[AddressText], msgspec.Meta(min_length=1, max_length=RECIPIENTS_MAX), "addresses"],
        subject: Annotated[str, msgspec.Meta(min_length=1, max_length=500)],
        body: Annotated[str, msgspec.Meta(max_length=100_000), "plain text"],
        cc: Annotated[list[AddressText], msgspec.Meta(max_length=RECIPIENTS_MAX)] = [],  # noqa: B006
        *,
        html: Annotated[str, msgspec.Meta(max_length=200_000), "the same text as HTML, if it needs a layout"] = "",
        attachments: Annotated[
            list[Name], msgspec.Meta(max_length=ATTACHMENTS_MAX), "names of documents to attach"
        ] = [],  # noqa: B006
        shared: Annotated[
            bool | None, "whether the attached documents are the store's; needed if the user has them too"
        ] = None,
        reply: Annotated[bool, "true to answer the mail that started the run, in its thread"] = False,
        in_reply_to: Annotated[MessageIdText, "the message_id of another mail to answer"] = "",
    ) -> dict[str, Any]:
        """Send an e-mail."""
        recipients = list(dict.fromkeys([*to, *cc]))
        if len(recipients) > RECIPIENTS_MAX:
            raise ToolError(f"an e-mail can have at most {RECIPIENTS_MAX} recipients, got {len(recipients)}")
        message = _compose(sender, to, cc, subject, body)
        if html:
            message.add_alternative(_with_newlines(html), subtype="html")
        attached = 0
        for name in dict.fromkeys(attachments):
            document, text = await read_one(documents, context, name, shared=shared)
            attached += document.text_bytes
            if attached > ATTACHMENTS_BYTES_MAX:
                raise ToolError(
                    f"the attachments are over the limit of {ATTACHMENTS_BYTES_MAX} bytes; nothing was sent"
                )
            _attach(message, name, text)
        thread = [in_reply_to]
        if reply:
            labels = await ledger.labels(RunKey(StoreId(context.store_id), RunId(context.run_id)))
            thread = [labels.get(label, "") for label in (MAIL_THREAD, MAIL_ID)]
            if not thread[-1]:
                raise ToolError("no e-mail with an id started this run: set in_reply_to, or leave out reply")
        _answer(message, thread)
        message["Date"] = format_datetime(datetime.fromtimestamp(clock.now(), UTC))
        # A call always sends the same id, so that receivers can detect duplicates.
        message["Message-ID"] = f"<{context.idempotency_key}.{context.store_id}@{sender.rpartition('@')[2]}>"
        sent = await mailer.send(message, recipients, CallKey(StoreId(context.store_id), CallId(context.call_id)))
        return {"to": to, "cc": cc, "subject": subject, "message_id": str(message["Message-ID"])} | sent

    return [send_email]


def _compose(sender: str, to: list[str], cc: list[str], subject: str, body: str) -> EmailMessage:
    """Build a message. Line breaks in values cannot inject headers.

    Raises:
        ToolError: An address or the subject is not allowed in a header.
    """
    message = EmailMessage(policy=POLICY)
    message["From"] = sender
    message["To"] = [_address(text) for text in to]
    if cc:
        message["Cc"] = [_address(text) for text in cc]
    if any(unicodedata.category(character) in {"Cc", "Zl", "Zp"} for character in subject):
        raise ToolError("the subject must be one line without control characters")
    if ENCODED in subject:
        raise ToolError(f"the subject must not contain {ENCODED}, which mail programs decode")
    message["Subject"] = subject
    message.set_content(_with_newlines(body))
    return message


def _answer(message: EmailMessage, thread: list[str]) -> None:
    """Mark the message as automatic and, if `thread` has valid message ids, as a reply to the last one."""
    if answered := [each for each in dict.fromkeys(thread) if each and re.fullmatch(_MESSAGE_ID, each)]:
        message["In-Reply-To"] = answered[-1]
        message["References"] = " ".join(answered)
    # RFC 3834: prevents automatic replies.
    message["Auto-Submitted"] = "auto-replied" if answered else "auto-generated"


def _with_newlines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _attach(message: EmailMessage, name: str, text: str) -> None:
    """Attach a document. Only the last part of `name` becomes the name of the attachment.

    Raises:
        ToolError: The name is not allowed in a header.
    """
    if ENCODED in name:
        raise ToolError(f"the document {name!r} cannot be attached: its name must not contain {ENCODED}")
    plain = "".join(character if character.isprintable() else "_" for character in name.rpartition("/")[2])
    kind = mimetypes.guess_type(plain)[0] or ""
    main, _, sub = (kind if kind.startswith("text/") or kind == "application/json" else "text/plain").partition("/")
    # Sent as bytes, so that the text arrives unchanged.
    message.add_attachment(
        text.encode(), maintype=main, subtype=sub, filename=plain or "document", params={"charset": "utf-8"}
    )


def _address(text: str) -> Address:
    """Return an address that matches the tool's schema. Raise ToolError if mail programs would decode it."""
    if ENCODED in text:
        raise ToolError(f"the address {text[:80]!r} must not contain {ENCODED}, which mail programs decode")
    try:
        return Address(addr_spec=text)
    except (ValueError, IndexError, MessageError):
        raise ToolError(f"{text[:80]!r} is not an e-mail address like ann@example.com") from None


def _preview(to: list[str], subject: str, body: str, cc: list[str], **more: Any) -> str:
    attachments, html = more["attachments"], more["html"]
    lines = [f"To: {', '.join(to)}", *([f"Cc: {', '.join(cc)}"] if cc else []), f"Subject: {subject}"]
    lines += [f"Attachments: {', '.join(attachments)}"] if attachments else []
    lines += ["Answers the e-mail that started the run"] if more["reply"] else []
    # Most mail programs show only the HTML.
    return "\n".join([*lines, "", body, *(["", "HTML:", html] if html else [])])


def _count(to: list[str], cc: list[str], **_: Any) -> int:
    return len({*to, *cc})


_TIMEOUT_SECONDS: Final = 30.0


class SmtpMailer:
    """Sends each message to a mail server over a separate connection."""

    def __init__(self, server: SmtpServer) -> None:
        self._server = server

    async def send(self, message: EmailMessage, recipients: list[str], call: CallKey) -> dict[str, Any]:
        try:
            refused = await self._server.send(message, recipients=recipients, seconds=_TIMEOUT_SECONDS)
        except aiosmtplib.SMTPRecipientsRefused as error:
            refusals = ", ".join(f"{refusal.recipient} ({refusal.code})" for refusal in error.recipients)
            raise ToolError(f"the mail server refused all recipients: {refusals}") from None
        except aiosmtplib.SMTPAuthenticationError:
            raise ToolError("the mail server refused the deployment's credentials; nothing was sent") from None
        except aiosmtplib.SMTPResponseException as error:
            raise ToolError(f"the mail server refused the message with code {error.code}") from None
        except aiosmtplib.SMTPConnectError:
            raise ToolError("the mail server cannot be reached; nothing was sent") from None
        except (aiosmtplib.SMTPException, TimeoutError) as error:
            # The server may already have accepted the message when the connection broke.
            raise ToolError(
                f"the mail server failed ({type(error).__name__}); it may have accepted the message"
            ) from None
        return {"sent": True} | ({"refused": sorted(refused)} if refused else {})


class OutboxFolder:
    """Writes messages to `<folder>/<store>/<call>.eml`, for deployments without a mail server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def send(self, message: EmailMessage, recipients: list[str], call: CallKey) -> dict[str, Any]:
        # Both parts are ids, so the path stays inside the folder.
        path = self._folder / call.store_id / f"{call.call_id}.eml"
        try:
            await asyncio.to_thread(_write, path, message.as_bytes())
        except OSError as error:
            raise ToolError(f"the message could not be written to the outbox folder: {error.strerror}") from None
        return {
            "sent": False,
            "outbox": f"{call.store_id}/{path.name}",
            "note": "No mail server is configured (PAWL_SMTP_URL), so the message was not sent:"
            " it was written to the outbox folder of the deployment.",
        }


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
        Path.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
