"""The settings of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from pawl.chassis.settings import PeerAddresses, ServiceSettings, TcpAddress, is_loopback


def _check_hosts(value: str) -> str:
    if "*" in value or "/" in value:
        raise ValueError("must be names of hosts with commas between, for example pawl.example.com")
    return value


class GatewaySettings(ServiceSettings):
    """See `.env.example`."""

    listen: TcpAddress = "127.0.0.1:7600"
    metrics_listen: TcpAddress = "127.0.0.1:7610"
    agent_loop_address: PeerAddresses = "127.0.0.1:7601"
    tool_registry_address: PeerAddresses = "127.0.0.1:7602"
    notifier_address: PeerAddresses = "127.0.0.1:7604"
    gateway_hosts: Annotated[str, AfterValidator(_check_hosts)] = ""
    gateway_seal_key: SecretStr = Field(min_length=32)
    gateway_session_hours: float = Field(default=12.0, gt=0, le=24 * 30)
    gateway_webhook_keys_file: Path | None = None
    message_bytes_max: int = Field(default=5 * 256 * 1024, ge=1024)
    unary_calls_max: int = Field(default=1000, ge=1)
    streams_max: int = Field(default=4000, ge=1)

    @property
    def hosts(self) -> frozenset[str]:
        """The hosts that it answers to beside loopback."""
        return frozenset(host.strip().lower() for host in self.gateway_hosts.split(",") if host.strip())

    @model_validator(mode="after")
    def _refuse_the_open(self) -> Self:
        if not is_loopback(self.listen) and not self.hosts:
            raise ValueError("PAWL_GATEWAY_HOSTS: is required where PAWL_LISTEN is not on loopback")
        return self
