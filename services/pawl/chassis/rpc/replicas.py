"""Choosing the replica that a call goes to.

What is done for one store costs less where it is done together: calls share messages,
transactions and what is remembered. So each store has a replica that all callers prefer, by
rendezvous hashing: they agree without asking each other, and one replica more or less moves
only the stores that it has. It is a preference and no rule: any replica can serve any call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

CALLS_MAX: Final = 128
"""A replica with so many calls of this process under way gets no more while another has fewer. The ledger writes
as many in one transaction: below that, replicas side by side would share out what is cheaper together."""

_KEYS_MAX: Final = 4096
# As deep as a store is in the owner of what a request is about.
_DEPTH_MAX: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A replica as its caller sees it.

    `is_away`: it cannot be reached, is not healthy, or is silent. `is_connected` says that it can be reached;
    before the first try neither is so. `is_busy`: it has refused a call as overloaded.
    """

    name: str
    is_connected: bool = True
    is_away: bool = False
    is_busy: bool = False
    calls: int = 0


def choose(key: str, replicas: Sequence[Standing]) -> int:
    """Return the index of the replica for a call that belongs to `key`; there must be one.

    It is the first by preference of those that are connected and have room, else the one of them with the fewest
    calls, else the first that was not tried yet, else the first that is connected, though silent, else the first.
    """
    preferred = preference(key, tuple(replica.name for replica in replicas))
    connected = [at for at in preferred if replicas[at].is_connected and not replicas[at].is_away]
    for at in connected:
        if not replicas[at].is_busy and replicas[at].calls < CALLS_MAX:
            return at
    if connected:
        return min(connected, key=lambda at: (replicas[at].is_busy, replicas[at].calls))
    return min(preferred, key=lambda at: (replicas[at].is_away, not replicas[at].is_connected))


@lru_cache(maxsize=_KEYS_MAX)
def preference(key: str, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the indices of all replicas, the one that `key` prefers first."""
    weights = [blake2b(f"{key}\0{name}".encode(), digest_size=8).digest() for name in names]
    return tuple(sorted(range(len(names)), key=lambda at: (weights[at], names[at]), reverse=True))


def key_of(request: Message) -> str:
    """Return what a request belongs to: the store that it names, wherever it does, else its worker."""
    for store_of in _stores_of(request.DESCRIPTOR):
        if store_id := store_of(request):
            return store_id
    return getattr(request, "worker_id", "")


@cache
def _stores_of(kind: Descriptor) -> Sequence[Callable[[Message], str]]:
    """Return what reads the stores that a message of this kind names, those first that are less deep in it."""
    found, level = [], [("", kind)]
    for _ in range(_DEPTH_MAX):
        fields = [(within + field.name, field) for within, message in level for field in message.fields]
        found += [name for name, field in fields if field.name == "store_id"]
        inner = [(name, field.message_type) for name, field in fields if not field.is_repeated]
        level = [(f"{name}.", message) for name, message in inner if message is not None]
    return [operator.attrgetter(name) for name in found]


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
