"""`python -m bench.plan`: the resources for 10, 1,000 and 1,000,000 active runs, calculated from the cost of one run.

This module measures nothing. `MEASURED` contains measurements, and `Mix` contains assumptions. The rest is arithmetic
and a seeded simulation of many databases (see `shards`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.percentiles import percentile
from bench.shards import Shard, bounded, grown, loads, moved, rendezvous, simulate, with_largest, zipf_weights

ACTIVE_RUNS: Final = (10, 1_000, 1_000_000)
STORES: Final = 10_000
SLACK: Final = 0.1
_SERVICES: Final = ("agent-loop", "job-store", "tool-registry", "notifier")
_SECONDS_A_DAY: Final = 86_400
_COMMITS: Final = 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one piece of work.

    `cpu_ms` is in milliseconds of one core, by process. `commits` are operations of the ledger, and `events` are
    entries of the log. `database_bytes` is the size of stored rows and indexes. `wal_bytes` are written to PostgreSQL's
    log.
    """

    cpu_ms: Mapping[str, float]
    commits: float
    events: float
    database_bytes: float
    wal_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured costs.

    `run` is a run with an immediate answer and one watching client. `tool_round` is an additional round with one call.
    `output` is an additional piece of an answer, which is shown as it arrives. `stream_kib` is agent-loop's memory per
    stream.
    """

    run: Cost
    tool_round: Cost
    output: Cost
    stream_kib: float


# Differences between runs with one answer, with one answer at 20 ms per chunk, and with three more rounds, each with 16
# concurrent runs. The two cores were busy with other work, so the CPU times are probably too high.
MEASURED: Final = Costs(
    run=Cost(
        cpu_ms={
            "agent-loop": 13.2,
            "job-store": 10.5,
            "tool-registry": 1.3,
            "notifier": 1.6,
            "postgres": 6.5,
            "nats": 1.4,
        },
        commits=4,
        events=8,
        database_bytes=14_000,
        wal_bytes=22_000,
    ),
    tool_round=Cost(
        cpu_ms={
            "agent-loop": 6.1,
            "job-store": 3.9,
            "tool-registry": 2.1,
            "notifier": 0.1,
            "postgres": 2.0,
            "nats": 0.3,
        },
        commits=3,
        events=6,
        database_bytes=4_300,
        wal_bytes=7_900,
    ),
    output=Cost(
        cpu_ms={"agent-loop": 1.6, "job-store": 1.55, "postgres": 0.61, "nats": 0.16},
        commits=1,
        events=1,
        database_bytes=410,
        wal_bytes=1_160,
    ),
    stream_kib=59.4,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Assumptions about the work.

    A run is active until it has ended. A `parked_share` of the active runs wait and do nothing. Each of the others
    makes `rounds_per_minute`. A run has `rounds_per_run`, and the last round produces the answer. A round has
    `outputs_per_round` pieces of output, each with a separate commit. A run has `watchers_per_run`, whether or not it
    is parked. A commit causes `nats_messages_per_commit`: it is published once, and delivered to an agent-loop that has
    a watcher. A database has `database_cores`, and a disk with `fsync_ms`. No process is planned to exceed
    `utilisation_max`, which for a service is a share of one core. A replica of agent-loop drives and serves as many
    runs as its default settings allow.
    """

    rounds_per_minute: float = 4.0
    rounds_per_run: float = 4.0
    outputs_per_round: float = 10.0
    watchers_per_run: float = 1.0
    parked_share: float = 0.5
    utilisation_max: float = 0.6
    nats_messages_per_commit: float = 2.0
    database_cores: int = 32
    fsync_ms: float = 1.0
    runs_per_replica_max: int = 256
    streams_per_replica_max: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Resources for a number of active runs. Rates are per second. Daily values assume this rate all day."""

    active_runs: int
    rounds: float
    commits: float
    events: float
    replicas: Mapping[str, int]
    database_cores: float
    databases: int
    wal_mb: float
    disk_gb_a_day: float
    nats_messages: float
    streams_gib: float


def plan(active_runs: int, mix: Mix, costs: Costs) -> Fleet:
    """Return the resources for a number of active runs with this mix."""
    driven = active_runs * (1 - mix.parked_share)
    rounds = driven * mix.rounds_per_minute / 60
    runs = rounds / mix.rounds_per_run
    work = ((runs, costs.run), (rounds - runs, costs.tool_round), (rounds * mix.outputs_per_round, costs.output))

    def total(of: Callable[[Cost], float]) -> float:
        return math.fsum(rate * of(cost) for rate, cost in work)

    def cores(process: str) -> float:
        return total(lambda cost: cost.cpu_ms.get(process, 0.0)) / 1000

    commits = total(lambda cost: cost.commits)
    streams = active_runs * mix.watchers_per_run
    # A service is one Python process with one Python thread, so it uses one core.
    replicas = {name: max(1, math.ceil(cores(name) / mix.utilisation_max)) for name in _SERVICES}
    replicas["agent-loop"] = max(
        replicas["agent-loop"],
        math.ceil(driven / mix.runs_per_replica_max),
        math.ceil(streams / mix.streams_per_replica_max),
    )
    return Fleet(
        active_runs=active_runs,
        rounds=rounds,
        commits=commits,
        events=total(lambda cost: cost.events),
        replicas=replicas,
        database_cores=cores("postgres"),
        databases=max(1, math.ceil(cores("postgres") / (mix.database_cores * mix.utilisation_max))),
        wal_mb=total(lambda cost: cost.wal_bytes) / 1e6,
        disk_gb_a_day=total(lambda cost: cost.database_bytes) * _SECONDS_A_DAY / 1e9,
        nats_messages=commits * mix.nats_messages_per_commit,
        streams_gib=streams * costs.stream_kib / 2**20,
    )


def shard_of(fleet: Fleet, mix: Mix) -> Shard:
    """Return one of the plan's databases, for the simulation."""
    return Shard(
        cores=mix.database_cores,
        commit_cpu_ms=fleet.database_cores / fleet.commits * 1000,
        disk_ms=mix.fsync_ms,
    )


# Tables.


def fleet_table(fleets: Sequence[Fleet]) -> Table:
    table = Table("", *(f"{fleet.active_runs:,} active runs" for fleet in fleets), title="What is needed")
    rows = {
        "rounds a second": [f"{fleet.rounds:,.1f}" for fleet in fleets],
        "commits a second": [f"{fleet.commits:,.0f}" for fleet in fleets],
        "events a second": [f"{fleet.events:,.0f}" for fleet in fleets],
        **{f"{name}, replicas": [f"{fleet.replicas[name]:,}" for fleet in fleets] for name in _SERVICES},
        "PostgreSQL, busy cores": [f"{fleet.database_cores:,.2f}" for fleet in fleets],
        "PostgreSQL, databases": [f"{fleet.databases:,}" for fleet in fleets],
        "WAL, MB a second": [f"{fleet.wal_mb:,.2f}" for fleet in fleets],
        "disk, GB a day": [f"{fleet.disk_gb_a_day:,.1f}" for fleet in fleets],
        "NATS, messages a second": [f"{fleet.nats_messages:,.0f}" for fleet in fleets],
        "open streams, GiB": [f"{fleet.streams_gib:,.2f}" for fleet in fleets],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _latency(shard: Shard, commits: float, seed: int) -> str:
    if shard.utilisation(commits) >= 1:
        return "no end"
    return f"{percentile(simulate(shard, commits, commits=_COMMITS, seed=seed), 0.99):.1f}"


def hottest_table(shard: Shard, commits: float, counts: Sequence[int], exponents: Sequence[float], seed: int) -> Table:
    """Return the load of the hottest shard by the number of shards and the inequality of stores."""
    table = Table(
        *("shards", "Zipf exponent", "largest store", "mean busy"),
        *("hottest by hash", "p99, ms", "hottest by directory", "p99, ms", "stores in the directory"),
        title="The hottest shard",
    )
    for count in counts:
        hashed = rendezvous(STORES, count)
        for exponent in exponents:
            weights = zipf_weights(STORES, exponent)
            placed = bounded(weights, count, slack=SLACK)
            hot = [max(loads(placement, weights, count)) * commits for placement in (hashed, placed)]
            table.add_row(
                *(f"{count}", f"{exponent:g}", f"{weights[0]:.2%}", f"{shard.utilisation(commits / count):.0%}"),
                *(f"{shard.utilisation(hot[0]):.0%}", _latency(shard, hot[0], seed)),
                *(f"{shard.utilisation(hot[1]):.0%}", _latency(shard, hot[1], seed)),
                f"{len(moved(hashed, placed)):,}",
            )
    return table


def giant_table(shard: Shard, commits: float, count: int, seed: int) -> Table:
    """Return a table of what happens if one store is as large as several average shards."""
    table = Table(
        *("largest store, of a shard's share", "its commits/s", "hottest shard", "p99, ms", "next hottest", "p99, ms"),
        title=f"One store that outgrows its shard, of {count}; others with exponent 0.6, placed by directory",
    )
    for share in (0.1, 0.5, 1.0, 1.25, 1.5, 2.0):
        weights = with_largest(zipf_weights(STORES, 0.6), share / count)
        placed = bounded(weights, count, slack=SLACK)
        found = loads(placed, weights, count)
        hot = found[placed[0]] * commits
        rest = max(load for number, load in enumerate(found) if number != placed[0]) * commits
        table.add_row(
            *(f"{share:g}", f"{weights[0] * commits:,.0f}"),
            *(f"{shard.utilisation(hot):.0%}", _latency(shard, hot, seed)),
            *(f"{shard.utilisation(rest):.0%}", _latency(shard, rest, seed)),
        )
    return table


def moves_table(counts: Sequence[tuple[int, int]], exponent: float) -> Table:
    """Return a table of the stores and the load that move when shards are added."""
    table = Table(
        *("from", "to", "by hash: stores", "load", "hottest", "by directory: stores", "load", "hottest"),
        title=f"What moves when shards are added; exponent {exponent:g}; hottest: of the mean",
    )
    weights = zipf_weights(STORES, exponent)
    for before, after in counts:
        cells = []
        directory = bounded(weights, before, slack=SLACK)
        for old, new in (
            (rendezvous(STORES, before), rendezvous(STORES, after)),
            (directory, grown(directory, weights, after, slack=SLACK)),
        ):
            stores = moved(old, new)
            load = math.fsum(weights[store] for store in stores)
            hottest = max(loads(new, weights, after)) * after
            cells += [f"{len(stores):,} ({len(stores) / STORES:.1%})", f"{load:.1%}", f"{hottest:.2f}"]
        table.add_row(f"{before}", f"{after}", *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plan", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--exponents", type=float, nargs="+", default=[0.0, 0.6, 0.8, 1.0], help="of Zipf's law")
    options = parser.parse_args()
    mix, costs = Mix(), MEASURED
    fleets = [plan(runs, mix, costs) for runs in ACTIVE_RUNS]
    largest = fleets[-1]
    shard, least = shard_of(largest, mix), largest.databases
    console = Console(width=150)
    console.print(mix)
    console.print(fleet_table(fleets))
    held = shard.cores * mix.utilisation_max / shard.commit_cpu_ms * 1000 * largest.active_runs / largest.commits
    console.print(f"{shard} holds {held:,.0f} active runs at {mix.utilisation_max:.0%}, of one store or of many.")
    counts = [least, math.ceil(least * 1.25), math.ceil(least * 1.5), least * 2]
    console.print(hottest_table(shard, largest.commits, counts, options.exponents, options.seed))
    console.print(giant_table(shard, largest.commits, counts[1], options.seed))
    console.print(moves_table([(least, least + 3), (least, counts[1]), (least, counts[3])], 0.6))


if __name__ == "__main__":
    main()
