from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, SecretStr, model_validator

from pawl.chassis.process.address import is_loopback
from pawl.server.process.settings import Constant, PeerAddresses, PublicUrl, ServiceSettings, TcpAddress


def _check_hosts(value: str) -> str:
    if "*" in value or "/" in value:
        raise ValueError("must be host names separated by commas, for example pawl.example.com")
    return value


_SEAL_KEY_CHARACTERS_MIN: Final = 32
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def _check_seal_keys(value: SecretStr) -> SecretStr:
    keys = _names(value.get_secret_value())
    if not keys or len(min(keys, key=len)) < _SEAL_KEY_CHARACTERS_MIN:
        raise ValueError(f"each key must have at least {_SEAL_KEY_CHARACTERS_MIN} characters")
    return value


def _check_origins(value: str) -> str:
    for origin in _names(value):
        parts = urlsplit(origin)
        is_plain = origin == f"{parts.scheme}://{parts.netloc}" and not {"*", "@"} & set(origin)
        if not is_plain or not parts.hostname or _DEFAULT_PORTS.get(parts.scheme, parts.port) == parts.port:
            raise ValueError(
                "must be origins separated by commas, as browsers send them: https://app.example.com, without a path,"
                " a * or the default port"
            )
    return value


def _names(value: str) -> list[str]:
    return [name.strip().lower() for name in value.split(",") if name.strip()]


class GatewaySettings(ServiceSettings):
    """The gateway's settings, which are described in `.env.example`."""

    listen: TcpAddress = "127.0.0.1:7600"
    metrics_listen: TcpAddress = "127.0.0.1:7610"
    agent_loop_address: PeerAddresses = "127.0.0.1:7601"
    tool_registry_address: PeerAddresses = "127.0.0.1:7602"
    notifier_address: PeerAddresses = "127.0.0.1:7604"
    job_store_address: PeerAddresses = "127.0.0.1:7603"
    gateway_hosts: Annotated[str, AfterValidator(_check_hosts)] = ""
    gateway_origins: Annotated[str, AfterValidator(_check_origins)] = ""
    gateway_seal_key: Annotated[SecretStr, AfterValidator(_check_seal_keys)]
    gateway_webhook_keys_file: Path | None = None
    gateway_oidc_file: Path | None = None
    public_url: PublicUrl = ""
    data: Path = Path(".pawl")

    gateway_session_hours: Constant[float] = 12.0
    message_bytes_max: Constant[int] = 5 * 256 * 1024
    streams_max: Constant[int] = 4000

    @property
    def hosts(self) -> frozenset[str]:
        """Hosts that are allowed in addition to loopback. IPv6 addresses have no brackets."""
        return frozenset(re.sub(r"^\[([0-9a-f:.]+)\]$", r"\1", name) for name in _names(self.gateway_hosts))

    @property
    def origins(self) -> frozenset[str]:
        """Other origins whose pages may use the cross-origin routes."""
        return frozenset(_names(self.gateway_origins))

    @model_validator(mode="after")
    def _check_public(self) -> Self:
        if not is_loopback(self.listen) and not self.hosts:
            raise ValueError("PAWL_GATEWAY_HOSTS is required if PAWL_LISTEN is not on loopback")
        if self.gateway_oidc_file and (self.hosts or not is_loopback(self.listen)) and not self.public_url:
            raise ValueError("PAWL_PUBLIC_URL is required with PAWL_GATEWAY_OIDC_FILE, for redirects from the provider")
        return self
