from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from pawl.server.process.settings import ListenAddress, PeerAddresses, ServiceSettings


class MailboxSettings(ServiceSettings):
    """The settings of the mailbox reader, described in `.env.example`."""

    listen: ListenAddress = "127.0.0.1:7605"
    metrics_listen: ListenAddress = "127.0.0.1:7615"
    service_key: SecretStr
    agent_loop_address: PeerAddresses = "127.0.0.1:7601"
    job_store_address: PeerAddresses = "127.0.0.1:7603"
    tool_registry_address: PeerAddresses = "127.0.0.1:7602"
    egress_file: Path | None = None
    mailbox_passwords_file: Path
