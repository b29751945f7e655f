"""Mail over SMTP, or into a folder where no server is configured."""

from __future__ import annotations

import asyncio
import contextlib
import os
from email.message import EmailMessage
from pathlib import Path
from typing import Any, Final

import aiosmtplib

from pawl.chassis.egress.mail import SmtpServer
from pawl.chassis.ids import CallKey
from pawl.tool_registry.sdk.context import ToolError

_TIMEOUT_SECONDS: Final = 30.0


class SmtpMailer:
    """Hands messages to a server, each over a connection of its own."""

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
            # The connection broke: perhaps after the message was taken.
            raise ToolError(f"the mail server failed ({type(error).__name__}); it may have taken the message") from None
        return {"sent": True} | ({"refused": sorted(refused)} if refused else {})


class OutboxFolder:
    """Writes messages to `<folder>/<store>/<call>.eml`, for a deployment without a mail server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def send(self, message: EmailMessage, recipients: list[str], call: CallKey) -> dict[str, Any]:
        # Both are ids, so the path stays inside the folder.
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
