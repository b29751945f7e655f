"""The addresses of a suite: `endpoints.json` in the data folder, by which the command line finds a running suite."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from pawl.launcher.secrets import write_private

FILE_NAME = "endpoints.json"


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a service; `pid` is None while it is down, the addresses are those it had last."""

    grpc: str
    metrics: str
    pid: int | None
    ready: bool


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
        """The gRPC addresses of all replicas of a service."""
        return [replica.grpc for replica in self.services.get(service, []) if replica.grpc]


def write_endpoints(endpoints: Endpoints) -> None:
    """Writes the file whole or not at all."""
    write_private(Path(endpoints.data) / FILE_NAME, json.dumps(msgspec.to_builtins(endpoints), indent=2) + "\n")


def read_endpoints(data: Path) -> Endpoints | None:
    """Return what the launcher of that data folder wrote last; None if no suite runs there, as far as one can see."""
    try:
        return msgspec.json.decode((data / FILE_NAME).read_bytes(), type=Endpoints)
    except (OSError, msgspec.MsgspecError):
        return None


def remove_endpoints(data: Path) -> None:
    """Says that no suite runs there any more."""
    (data / FILE_NAME).unlink(missing_ok=True)
