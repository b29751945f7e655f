"""Choosing the replica that a call goes to.

What is done for one store costs less where it is done together: calls share messages,
transactions and what is remembered. So each store has a replica that all callers prefer, by
rendezvous hashing: they agree without asking each other, and one replica more or less moves
only the stores that it has. It is a preference and no rule: any replica can serve any call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

CALLS_MAX: Final = 128
"""A replica with so many calls of this process under way gets no more while another has fewer. The ledger writes
as many in one transaction: below that, replicas side by side would share out what is cheaper together."""

_KEYS_MAX: Final = 4096


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


def key_of(request: Any) -> str:
    """Return what a request belongs to: its store, else its worker."""
    context = getattr(request, "context", request)
    return getattr(context, "store_id", "") or getattr(request, "worker_id", "")
