"""`python -m bench.costs`: the costs of a run, of one more round and of one more piece of output, for `bench.plan`.

There are three loads: an immediate answer, the same answer after three rounds with a call, and the answer at 20 ms per
chunk. The costs are the differences per run, over all processes of Pawl.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.processes import cpu_seconds
from bench.subjects import SYNCS, TRANSACTIONS, Pawl
from bench.world import pawl

_TOOL_ROUNDS: Final = 3
_CHUNK_MILLISECONDS: Final = 20
_AT_ONCE: Final = 16
# Time to wait after a load for pending work, such as relays, notifications and table sizes.
_SETTLE_SECONDS: Final = 2.0

_EVENTS: Final = "SELECT count(*) FROM job_store.events"
_WAL: Final = "SELECT (pg_current_wal_lsn() - '0/0')::float8"
_SIZE: Final = """
SELECT sum(pg_total_relation_size(c.oid))::float8 FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace
WHERE relkind = 'r' AND nspname IN ('job_store', 'notifier', 'tool_registry')
"""
_QUERIES: Final = {"rows of events": _EVENTS, "WAL, bytes": _WAL, "transactions": TRANSACTIONS, "syncs": SYNCS}


@dataclass(frozen=True, slots=True)
class Load:
    """Costs of one run of a load: CPU milliseconds by process, and other costs."""

    name: str
    cost: Mapping[str, float]

    def minus(self, name: str, other: Load, divided_by: float = 1.0) -> Load:
        """Return the difference from the costs of `other`, divided by `divided_by`."""
        return Load(name, {key: (value - other.cost[key]) / divided_by for key, value in self.cost.items()})


async def _sample(subject: Pawl) -> dict[str, float]:
    found = {f"{name}, ms": seconds * 1000 for name, seconds in cpu_seconds(subject.processes()).items()}
    found |= {name: float(await subject.ask(query)) for name, query in _QUERIES.items()}
    return found | {"stays, bytes": float(await subject.ask(_SIZE))}


async def measure(name: str, count: int, *, tool_rounds: float = 0, chunk_milliseconds: float = 0) -> Load:
    """Return the costs per run of `count` runs, 16 of them at a time, after a warm-up."""
    async with pawl(tool_rounds=tool_rounds, chunk_milliseconds=chunk_milliseconds) as (subject, _):
        await subject.run(_AT_ONCE * 4, _AT_ONCE)
        await asyncio.sleep(_SETTLE_SECONDS)
        before = await _sample(subject)
        await subject.run(count, _AT_ONCE)
        await asyncio.sleep(_SETTLE_SECONDS)
        after = await _sample(subject)
    return Load(name, {key: (after[key] - before[key]) / count for key in before})


async def main(count: int) -> None:
    once = await measure("a run with one round", count)
    rounds = await measure("with three more rounds", count, tool_rounds=_TOOL_ROUNDS)
    slow = await measure("with the answer at 20 ms a chunk", count, chunk_milliseconds=_CHUNK_MILLISECONDS)
    pieces = max(1.0, slow.cost["rows of events"] - once.cost["rows of events"])
    loads = [
        once,
        rounds.minus("one more round with a call", once, _TOOL_ROUNDS),
        slow.minus("one more piece of output", once, pieces),
    ]
    table = Table("", *(load.name for load in loads))
    for key in once.cost:
        table.add_row(key, *(f"{load.cost[key]:,.2f}" for load in loads))
    Console().print(table)
    print(f"{count} runs of each, {_AT_ONCE} concurrent; load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.costs", description=__doc__)
    parser.add_argument("--runs", type=int, default=300, help="runs of each load")
    asyncio.run(main(parser.parse_args().runs))
