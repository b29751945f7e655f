from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from pawl.server.egress.mail import SenderAddress, SmtpUrl
from pawl.server.process.settings import Constant, ListenAddress, PeerAddresses, PublicUrl, ServiceSettings


class NotifierSettings(ServiceSettings):
    """The settings of the notifier, described in `.env.example`."""

    listen: ListenAddress = "127.0.0.1:7604"
    metrics_listen: ListenAddress = "127.0.0.1:7614"
    service_key: SecretStr
    job_store_address: PeerAddresses = "127.0.0.1:7603"
    egress_file: Path | None = None
    smtp_url: SmtpUrl = None
    mail_from: SenderAddress = "pawl@localhost"
    public_url: PublicUrl = ""

    message_bytes_max: Constant[int] = 1024 * 1024
