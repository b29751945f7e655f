"""Deliveries as e-mail, over the mail server of the deployment."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import aiosmtplib

from pawl.chassis.egress.mail import SmtpServer
from pawl.chassis.process.clock import Clock
from pawl.notifier.deliveries.mail import written
from pawl.notifier.deliveries.rules import Attempt, Outcome
from pawl.notifier.deliveries.webhook_sender import TRY_SECONDS

_FINAL: Final = range(500, 600)


class Emails:
    """See `ports.ChannelSender`. What the mail server has taken counts as delivered. Without one nothing is sent.

    Messages have a link at `public_url` that ends them, if there is one.
    """

    def __init__(self, server: SmtpServer | None, sender: str, clock: Clock, public_url: str = "") -> None:
        self._server = server
        self._sender = sender
        self._clock = clock
        self._public_url = public_url

    async def send(self, attempt: Attempt) -> Outcome:
        if self._server is None:
            return Outcome(error="the deployment has no mail server any more", is_receivers=False)
        started = self._clock.monotonic()
        outcome = await self._sent(self._server, attempt)
        return replace(outcome, latency_seconds=self._clock.monotonic() - started)

    async def rest(self, attempt: Attempt) -> None:
        """Nothing goes on."""

    async def _sent(self, server: SmtpServer, attempt: Attempt) -> Outcome:
        recipient = attempt.url.removeprefix("mailto:")
        message = written(attempt, sender=self._sender, public_url=self._public_url)
        try:
            await server.send(message, sender=self._sender, recipients=[recipient], seconds=TRY_SECONDS)
        except aiosmtplib.SMTPRecipientsRefused as refused:
            return _refusal(refused.recipients[0].code, "the address")
        except aiosmtplib.SMTPDataError as refused:
            return _refusal(refused.code, "the message")
        except aiosmtplib.SMTPResponseException as refused:
            # Before any receiver is named: it refuses us.
            return Outcome(error=f"the mail server refused with code {refused.code}", is_receivers=False)
        except (aiosmtplib.SMTPException, OSError) as error:
            # Perhaps after the message was taken.
            told = f"the mail server could not be reached, or fell silent ({type(error).__name__})"
            return Outcome(error=told, is_receivers=False)
        return Outcome(status=250)


def _refusal(code: int, what: str) -> Outcome:
    return Outcome(status=code, error=f"the mail server refused {what} with code {code}", is_final=code in _FINAL)
