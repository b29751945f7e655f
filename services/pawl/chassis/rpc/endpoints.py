"""The addresses of a suite: `endpoints.json` in the data folder, by which clients find a suite on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

FILE_NAME: Final = "endpoints.json"
DEFAULT_PORTS: Final = {
    "gateway": 7600,
    "agent-loop": 7601,
    "tool-registry": 7602,
    "job-store": 7603,
    "notifier": 7604,
    "gateway-metrics": 7610,
    "agent-loop-metrics": 7611,
    "tool-registry-metrics": 7612,
    "job-store-metrics": 7613,
    "notifier-metrics": 7614,
    "postgres": 7620,
    "nats": 7621,
    "model": 7622,
}
"""The port of everything that listens; further replicas of a service take free ones."""


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a service; `pid` is None while it is down, the addresses are those it had last.

    It serves its methods at `grpc`, or, the gateway, at `http`; the other one is empty.
    """

    grpc: str
    metrics: str
    pid: int | None
    ready: bool
    http: str = ""


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The suite as it stands. No secrets: `secrets` is the folder that has them.

    `nats` and `postgres` are None where the embedded server is replaced, `model_base_url` where the scripted model is.
    `authority` is the file of certificates by which to check those of the services; None if they speak no TLS.
    """

    launcher_pid: int
    data: str
    secrets: str
    services: dict[str, list[Replica]]
    nats: str | None = None
    postgres: str | None = None
    model_base_url: str | None = None
    authority: str | None = None

    def addresses(self, service: str) -> list[str]:
        """Return the gRPC addresses of all replicas of a service."""
        return [replica.grpc for replica in self.services.get(service, []) if replica.grpc]


def read_endpoints(data: Path) -> Endpoints | None:
    """Return what the launcher of that data folder wrote last; None if no suite runs there, as far as one can see."""
    try:
        return msgspec.json.decode((data / FILE_NAME).read_bytes(), type=Endpoints)
    except (OSError, msgspec.MsgspecError):
        return None
