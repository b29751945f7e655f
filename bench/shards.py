"""Simulates many databases: stores spread over shards, and the latency of commits on each shard. Pure and seeded."""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# The shard of each store. Stores and shards are numbered from 0.
Placement = Mapping[int, int]

_CHOICES: Final = 2


def zipf_weights(stores: int, exponent: float) -> list[float]:
    """Return each store's part of the total load, largest first, with a sum of 1. With exponent 0, all are equal."""
    weights = [rank**-exponent for rank in range(1, stores + 1)]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def with_largest(weights: Sequence[float], largest: float) -> list[float]:
    """Return the weights with `largest` as the first, and with the others scaled so that the sum is still 1."""
    factor = (1 - largest) / math.fsum(weights[1:])
    return [largest, *(weight * factor for weight in weights[1:])]


def loads(placement: Placement, weights: Sequence[float], shards: int) -> list[float]:
    """Return each shard's part of the total load."""
    found = [0.0] * shards
    for store, shard in placement.items():
        found[shard] += weights[store]
    return found


def moved(before: Placement, after: Placement) -> list[int]:
    """Return the stores whose shard has changed."""
    return [store for store, shard in after.items() if before[store] != shard]


# Placement without a directory: any process can calculate a store's shard.


def preferences(store: int, shards: int, count: int) -> list[int]:
    """Return the `count` shards that rendezvous hashing prefers for a store, best first."""
    return heapq.nlargest(count, range(shards), key=lambda shard: (_score(store, shard), shard))


def rendezvous(stores: int, shards: int) -> dict[int, int]:
    """Place each store on the shard with the highest hash of store and shard, regardless of the store's size."""
    return {store: preferences(store, shards, 1)[0] for store in range(stores)}


def _score(store: int, shard: int) -> bytes:
    return hashlib.blake2b(store.to_bytes(8, "big") + shard.to_bytes(8, "big"), digest_size=8).digest()


# Placement with a directory of those stores that are not on their rendezvous shard.


def bounded(weights: Sequence[float], shards: int, *, slack: float) -> dict[int, int]:
    """Place stores, the largest first, on the first of their two preferred shards that stays within the bound.

    The bound is the mean load of a shard times 1 + `slack`. A store that fits on neither shard goes to the emptiest
    shard. Therefore the load of a shard exceeds neither the bound nor the mean plus its largest store, whichever is
    more. The first choice is preferred to an emptier shard, because stores on it need no directory entry.
    """
    bound = (1 + slack) / shards
    found = [0.0] * shards
    placement: dict[int, int] = {}
    for store in sorted(range(len(weights)), key=lambda store: (-weights[store], store)):
        choices = preferences(store, shards, _CHOICES)
        fitting = (choice for choice in choices if found[choice] + weights[store] <= bound)
        shard = next(fitting, None)
        if shard is None:
            shard = min(range(shards), key=lambda shard: found[shard])
        placement[store] = shard
        found[shard] += weights[store]
    return placement


def grown(placement: Placement, weights: Sequence[float], shards: int, *, slack: float) -> dict[int, int]:
    """Return the placement after adding shards. Stores leave only shards that are over the bound.

    From such a shard, the largest stores that fit on the emptiest shard move there, until the shard is within the bound
    or no store fits.
    """
    bound = (1 + slack) / shards
    found = loads(placement, weights, shards)
    after = dict(placement)
    members: dict[int, list[int]] = {}
    for store, shard in placement.items():
        members.setdefault(shard, []).append(store)
    for shard in sorted(members, key=lambda shard: -found[shard]):
        for store in sorted(members[shard], key=lambda store: (-weights[store], store)):
            if found[shard] <= bound:
                break
            target = min(range(shards), key=lambda shard: found[shard])
            if found[target] + weights[store] <= bound:
                after[store] = target
                found[shard] -= weights[store]
                found[target] += weights[store]
    return after


# A shard as a queue.


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A database: its `cores`, the CPU time of a commit, and its disk wait.

    `commit_cpu_ms` is the mean of a lognormal distribution whose standard deviation is `variation` times the mean.
    `disk_ms` is added to each commit. Disks are assumed to handle requests concurrently.
    """

    cores: int
    commit_cpu_ms: float
    disk_ms: float
    variation: float = 1.0

    def utilisation(self, commits_per_second: float) -> float:
        """Return the part of the cores that this many commits use. Above 1, the database cannot keep up."""
        return commits_per_second * self.commit_cpu_ms / 1000 / self.cores


def simulate(shard: Shard, commits_per_second: float, *, commits: int, seed: int) -> list[float]:
    """Return the latencies, in milliseconds, of this many commits that arrive at random and are served in order.

    Unlike in job-store, commits do not become cheaper when many of them wait, so the results are pessimistic.
    """
    source = random.Random(seed)
    sigma = math.sqrt(math.log(1 + shard.variation**2))
    mu = math.log(shard.commit_cpu_ms) - sigma**2 / 2
    free = [0.0] * shard.cores
    now = 0.0
    latencies = []
    for _ in range(commits):
        now += source.expovariate(commits_per_second) * 1000
        done = max(now, free[0]) + source.lognormvariate(mu, sigma)
        heapq.heapreplace(free, done)
        latencies.append(done - now + shard.disk_ms)
    return latencies
