"""What the suite consists of, as data: the services, in the order in which they start."""

from __future__ import annotations

import dataclasses
import sys


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One service: how to run it and what to give it.

    The process must take its settings from the environment, write its addresses (`grpc`, `metrics`) to the file named
    by PAWL_ADDRESS_FILE, and serve the standard gRPC health service.
    """

    name: str
    command: tuple[str, ...]
    nats_user: str

    @property
    def address_variable(self) -> str:
        """The variable by which later services learn where this one listens."""
        return f"PAWL_{self.name.replace('-', '_').upper()}_ADDRESS"


def service(name: str) -> ServiceSpec:
    """One of Pawl's own services."""
    package = name.replace("-", "_")
    return ServiceSpec(name=name, command=(sys.executable, "-m", f"services.{package}"), nats_user=package)


STAGES: tuple[tuple[ServiceSpec, ...], ...] = (
    (service("job-store"),),
    (service("tool-registry"), service("notifier")),
    (service("agent-loop"),),
)
"""A stage starts when everything before it is ready, and knows the addresses of all that. Stopping goes backwards."""

DEFAULT_PORTS = {
    "agent-loop": 7601,
    "tool-registry": 7602,
    "job-store": 7603,
    "notifier": 7604,
    "agent-loop-metrics": 7611,
    "tool-registry-metrics": 7612,
    "job-store-metrics": 7613,
    "notifier-metrics": 7614,
    "postgres": 7620,
    "nats": 7621,
    "model": 7622,
}
"""The port of everything that listens; further replicas of a service take free ones."""
