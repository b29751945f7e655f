"""The settings of the notifier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from pawl.chassis.mail import SenderAddress, SmtpUrl
from pawl.chassis.settings import ListenAddress, PeerAddresses, PublicUrl, ServiceSettings
from pawl.notifier.domain.channel import OWN_SERVICES, SERVICES


def read_schemes(text: str) -> frozenset[str]:
    """Return the schemes of services in a text with commas between.

    Raises:
        ValueError: one is none of those that are supported.
    """
    named = frozenset(name for part in text.split(",") if (name := part.strip()))
    if unknown := named - SERVICES - OWN_SERVICES:
        supported = ",".join(sorted(SERVICES | OWN_SERVICES))
        raise ValueError(f"{','.join(sorted(unknown))}: not supported; of Apprise there may be {supported}")
    return named


def _check_schemes(text: str) -> str:
    read_schemes(text)
    return text


ServiceSchemes = Annotated[str, AfterValidator(_check_schemes)]
"""Schemes of services, as `read_schemes` takes them."""


class NotifierSettings(ServiceSettings):
    """See `.env.example`."""

    listen: ListenAddress = "127.0.0.1:7604"
    metrics_listen: ListenAddress = "127.0.0.1:7614"
    service_key: SecretStr
    job_store_address: PeerAddresses = "127.0.0.1:7603"
    message_bytes_max: int = Field(default=1024 * 1024, ge=1024)
    notifications_keep_days: float = Field(default=30.0, gt=0)
    egress_file: Path | None = None
    smtp_url: SmtpUrl = None
    mail_from: SenderAddress = "pawl@localhost"
    notify_apprise: ServiceSchemes = ""
    public_url: PublicUrl = ""

    @property
    def apprise_schemes(self) -> frozenset[str]:
        """The schemes of Apprise that users may name."""
        return read_schemes(self.notify_apprise)
