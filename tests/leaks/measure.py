"""Measures the resources of an idle process and whether they grow."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import median_low
from typing import Final

import asyncpg
import psutil

from pawl.server.db.idle import IdleConnections

_SETTLE_SECONDS_MAX: Final = 60.0
# The listener of tool-registry for workers, on a thread that has run nothing else.
_LISTENING: Final = 1
_COLLECTIONS_MAX: Final = 10
_TYPES_SHOWN: Final = 12
# Variation from active work, pools, and streams that stay open for a minute after their last use.
_NOISE: Final = {"tasks": 10, "descriptors": 10, "threads": 4, "objects": 1000, "blocks": 4000, "kib": 4096}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Counts after some operations.

    The garbage collector tracks `objects`; `blocks` are all small allocations of Python.
    """

    operations: int
    tasks: int
    descriptors: int
    threads: int
    objects: int
    blocks: int
    kib: int


async def take(operations: int, before: Sample | None) -> Sample:
    """Take a sample once there are about as many tasks and descriptors as in `before`, or after a minute."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _SETTLE_SECONDS_MAX
    gc.unfreeze()  # Services freeze their objects once they have started.
    gc.collect()
    await _close_connections()
    while before is not None and loop.time() < deadline:
        if (
            len(asyncio.all_tasks()) <= before.tasks + _NOISE["tasks"]
            and psutil.Process().num_fds() <= before.descriptors + _NOISE["descriptors"]
        ):
            break
        await asyncio.sleep(0.1)
        await _close_connections()
    # Finalizers and callbacks of one collection release more objects.
    for _ in range(_COLLECTIONS_MAX):
        if not gc.collect():
            break
        await asyncio.sleep(0)
    _give_back()
    process = psutil.Process()
    return Sample(
        operations=operations,
        tasks=len(asyncio.all_tasks()),
        descriptors=process.num_fds(),
        threads=process.num_threads(),
        objects=len(gc.get_objects()),
        blocks=sys.getallocatedblocks(),
        kib=process.memory_info().rss // 1024,
    )


async def _close_connections() -> None:
    """Close the connections of every pool: each keeps up to 100 prepared statements, which vary with its work.

    Idle services poll their databases, so this waits for a moment at which no connection is in use.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _SETTLE_SECONDS_MAX
    everything = gc.get_objects()
    pools = [found for found in everything if type(found) is asyncpg.Pool and not found.is_closing()]
    # The pool regards these connections as used.
    kept = [found for found in everything if type(found) is IdleConnections]
    del everything
    while True:
        for pool in pools:
            for _ in range(pool.get_idle_size()):
                (await pool.acquire()).terminate()
        for each in kept:
            await each.expire()
        # Normally none of this waits, so no connection is opened in between.
        if sum(pool.get_size() for pool in pools) <= _LISTENING or loop.time() > deadline:
            break
        # Long enough for a service to use a connection that it has just opened and would have to open again.
        await asyncio.sleep(0.2)
    # Long enough to close the sockets, too short for a pool to open its minimum connection.
    for _ in range(2):
        await asyncio.sleep(0)


def _give_back() -> None:
    """Make the C library return free memory to the system, so that only used memory is measured."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def census() -> Counter[str]:
    return Counter(f"{type(found).__module__}.{type(found).__qualname__}" for found in gc.get_objects())


def grown(before: Counter[str], after: Counter[str]) -> str:
    return ", ".join(f"{name} +{count}" for name, count in (after - before).most_common(_TYPES_SHOWN))


def slope(samples: Sequence[Sample], name: str) -> float:
    """Return the growth per operation, by least squares."""
    xs = [sample.operations for sample in samples]
    ys = [getattr(sample, name) for sample in samples]
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - middle_x) ** 2 for x in xs)
    return float(sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True)) / spread)


def growths(samples: Sequence[Sample], tolerance: Mapping[str, float]) -> list[str]:
    """Describe each count that grows by more than `tolerance` per operation and by more than noise in total.

    If each operation leaks an object, the count grows by at least one per operation, and does so between most samples.
    """
    found = []
    for name, allowed in tolerance.items():
        steps = [slope(pair, name) for pair in pairwise(samples)]
        growth = min(slope(samples, name), median_low(steps))
        in_all = growth * (samples[-1].operations - samples[0].operations)
        if growth > allowed and in_all > _NOISE[name]:
            found.append(f"{name} grow by {growth:.4f} an operation, and {allowed:g} is allowed")
    return found


def table(samples: Sequence[Sample]) -> str:
    names = [field.name for field in fields(Sample)]
    lines = [" ".join(f"{name:>11}" for name in names)]
    lines += [" ".join(f"{getattr(sample, name):>11}" for name in names) for sample in samples]
    lines.append(" ".join(["      slope"] + [f"{slope(samples, name):>11.4f}" for name in names[1:]]))
    return "\n".join(lines)
