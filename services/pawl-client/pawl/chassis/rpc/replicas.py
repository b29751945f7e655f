"""Selects the replica for a call.

It is cheaper to serve all calls of a store in one process, where they share messages, transactions and caches.
Therefore, all callers prefer the same replica for a store. They find it by rendezvous hashing, without coordination.
Adding or removing a replica moves only that replica's stores. Any replica can still serve any call.
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

# A replica that has this many calls from this process gets no more while another has fewer. The ledger writes this many
# in one transaction, and a lower limit would split work that is cheaper when done together.
CALLS_MAX: Final = 128

_KEYS_MAX: Final = 4096
# The depth of a store id in a request: request, object, owner.
_DEPTH_MAX: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaHealth:
    """A replica's health from the point of view of its caller.

    `is_unavailable` means that the replica is unreachable, unhealthy or silent. `is_connected` means that it is
    reachable. Before the first attempt to connect, both are False. `is_busy` means that the replica has just refused a
    call because it was overloaded.
    """

    name: str
    is_connected: bool = True
    is_unavailable: bool = False
    is_busy: bool = False
    calls: int = 0


def choose(key: str, replicas: Sequence[ReplicaHealth]) -> int:
    """Return the index of the replica for a call that belongs to `key`. `replicas` must not be empty.

    The first choice is the first replica in the order of preference that is connected and has capacity. If there is
    none, it is the connected replica with the fewest calls, preferably one that is not busy. If no connected replica
    answers, the first choice is the first replica that has not been tried yet, then the first connected but silent one,
    then the first of all.
    """
    preferred = preference(key, tuple(replica.name for replica in replicas))
    connected = [at for at in preferred if replicas[at].is_connected and not replicas[at].is_unavailable]
    for at in connected:
        if not replicas[at].is_busy and replicas[at].calls < CALLS_MAX:
            return at
    if connected:
        return min(connected, key=lambda at: (replicas[at].is_busy, replicas[at].calls))
    return min(preferred, key=lambda at: (replicas[at].is_unavailable, not replicas[at].is_connected))


@lru_cache(maxsize=_KEYS_MAX)
def preference(key: str, names: tuple[str, ...]) -> tuple[int, ...]:
    weights = [blake2b(f"{key}\0{name}".encode(), digest_size=8).digest() for name in names]
    return tuple(sorted(range(len(names)), key=lambda at: (weights[at], names[at]), reverse=True))


def key_of(request: Message) -> str:
    """Return the key of a request: its least nested store id, otherwise its worker id, otherwise an empty string."""
    for store_of in _stores_of(request.DESCRIPTOR):
        if store_id := store_of(request):
            return store_id
    return getattr(request, "worker_id", "")


@cache
def _stores_of(kind: Descriptor) -> Sequence[Callable[[Message], str]]:
    """Return getters for the store ids in messages of this type. The least nested come first."""
    found, level = [], [("", kind)]
    for _ in range(_DEPTH_MAX):
        fields = [(within + field.name, field) for within, message in level for field in message.fields]
        found += [name for name, field in fields if field.name == "store_id"]
        inner = [(name, field.message_type) for name, field in fields if not field.is_repeated]
        level = [(f"{name}.", message) for name, message in inner if message is not None]
    return [operator.attrgetter(name) for name in found]


FILE_NAME: Final = "endpoints.json"
# The default ports; additional replicas of a service use free ones.
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


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a service. While it is down, `pid` is None, and the addresses are the last ones that it had.

    `grpc` is the address of its gRPC server. For the gateway, `http` is the address of its HTTP server. The other field
    is empty.
    """

    grpc: str
    metrics: str
    pid: int | None
    ready: bool
    http: str = ""


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a running suite. `secrets` is the path of the folder with the secrets.

    `nats` and `postgres` are None if an external server replaces the embedded one. `model_base_url` is None if another
    model replaces the scripted one. `authority` is the file with the services' CA certificates, or None without TLS.
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
        return [replica.grpc for replica in self.services.get(service, []) if replica.grpc]


def read_endpoints(data: Path) -> Endpoints | None:
    """Return the state that the data folder's launcher wrote last, or None if it cannot be read."""
    try:
        return msgspec.json.decode((data / FILE_NAME).read_bytes(), type=Endpoints)
    except (OSError, msgspec.MsgspecError):
        return None
