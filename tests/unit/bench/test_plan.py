"""The plan: its arithmetic adds up, and placement and simulation keep what they promise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.percentiles import percentile
from bench.plan import MEASURED, Mix, plan, shard_of
from bench.shards import Shard, bounded, grown, loads, moved, rendezvous, simulate, with_largest, zipf_weights

STORES = 2000


def test_the_weights_of_all_stores_add_up_to_one() -> None:
    for exponent in (0.0, 0.6, 1.0, 1.4):
        weights = zipf_weights(STORES, exponent)
        assert math.fsum(weights) == pytest.approx(1)
        assert weights == sorted(weights, reverse=True)
    giant = with_largest(zipf_weights(STORES, 0.6), 0.25)
    assert giant[0] == 0.25
    assert math.fsum(giant) == pytest.approx(1)


@pytest.mark.parametrize("shards", [1, 2, 17])
def test_every_store_is_placed_and_no_load_is_lost(shards: int) -> None:
    weights = zipf_weights(STORES, 0.8)
    for placement in (rendezvous(STORES, shards), bounded(weights, shards, slack=0.1)):
        assert sorted(placement) == list(range(STORES))
        assert math.fsum(loads(placement, weights, shards)) == pytest.approx(1)
    moves = grown(bounded(weights, shards, slack=0.1), weights, shards + 3, slack=0.1)
    assert math.fsum(loads(moves, weights, shards + 3)) == pytest.approx(1)


@pytest.mark.parametrize("exponent", [0.0, 0.6, 0.8, 1.0, 1.4])
@pytest.mark.parametrize("slack", [0.02, 0.1, 0.5])
def test_no_shard_is_over_the_bound_but_for_one_large_store(exponent: float, slack: float) -> None:
    shards = 16
    weights = zipf_weights(STORES, exponent)
    placement = bounded(weights, shards, slack=slack)
    for shard, load in enumerate(loads(placement, weights, shards)):
        largest = max(weights[store] for store, where in placement.items() if where == shard)
        assert load <= max((1 + slack) / shards, 1 / shards + largest) + 1e-9


def test_a_store_that_outgrows_a_shard_leaves_the_others_within_the_bound() -> None:
    shards = 16
    weights = with_largest(zipf_weights(STORES, 0.6), 2 / shards)
    placement = bounded(weights, shards, slack=0.1)
    found = loads(placement, weights, shards)
    assert found[placement[0]] == pytest.approx(2 / shards)
    assert all(load <= 1.1 / shards for shard, load in enumerate(found) if shard != placement[0])


def test_a_new_shard_takes_its_part_of_the_stores_by_hash_and_no_other_store_moves() -> None:
    before, after = rendezvous(STORES, 10), rendezvous(STORES, 11)
    stores = moved(before, after)
    assert all(after[store] == 10 for store in stores)
    expected = STORES / 11
    assert abs(len(stores) - expected) < 4 * math.sqrt(expected)


def test_with_a_directory_only_what_was_too_much_moves() -> None:
    weights = zipf_weights(STORES, 0.6)
    before = bounded(weights, 10, slack=0.1)
    after = grown(before, weights, 11, slack=0.1)
    old = loads(before, weights, 10)
    assert all(old[before[store]] > 1.1 / 11 for store in moved(before, after))
    assert max(loads(after, weights, 11)) <= 1.1 / 11 + 1e-9
    assert len(moved(before, after)) < len(moved(rendezvous(STORES, 10), rendezvous(STORES, 11)))


def test_the_same_seed_gives_the_same_latencies() -> None:
    shard = Shard(cores=4, commit_cpu_ms=1.0, disk_ms=2.0)
    assert simulate(shard, 2000, commits=500, seed=3) == simulate(shard, 2000, commits=500, seed=3)
    assert simulate(shard, 2000, commits=500, seed=3) != simulate(shard, 2000, commits=500, seed=4)


def test_an_idle_shard_answers_in_the_time_of_a_commit() -> None:
    shard = Shard(cores=4, commit_cpu_ms=1.0, disk_ms=2.0)
    latencies = simulate(shard, 1, commits=20_000, seed=1)
    assert math.fsum(latencies) / len(latencies) == pytest.approx(3.0, rel=0.05)


def test_one_server_waits_as_the_formula_of_pollaczek_and_khinchine_says() -> None:
    shard = Shard(cores=1, commit_cpu_ms=1.0, disk_ms=0.0, variation=1.0)
    busy = 0.5
    latencies = simulate(shard, busy * 1000, commits=200_000, seed=1)
    mean = math.fsum(latencies) / len(latencies)
    assert mean == pytest.approx(1 + busy * (1 + shard.variation**2) / (2 * (1 - busy)), rel=0.05)


def test_latency_grows_with_the_load() -> None:
    shard = Shard(cores=8, commit_cpu_ms=1.0, disk_ms=1.0)
    p99 = [percentile(simulate(shard, 8000 * busy, commits=20_000, seed=1), 0.99) for busy in (0.3, 0.8, 0.95)]
    assert p99 == sorted(p99)
    assert shard.utilisation(4000) == 0.5


def test_a_thousand_times_the_runs_need_a_thousand_times_the_rest() -> None:
    small, large = (plan(runs, Mix(), MEASURED) for runs in (1_000, 1_000_000))
    for name in ("commits", "events", "database_cores", "wal_mb", "disk_gb_a_day", "nats_messages", "streams_gib"):
        assert getattr(large, name) == pytest.approx(1000 * getattr(small, name))
    assert large.databases * Mix().database_cores * Mix().utilisation_max >= large.database_cores


def test_what_is_parked_makes_no_commits() -> None:
    parked = plan(1000, replace(Mix(), parked_share=1.0), MEASURED)
    assert (parked.commits, parked.database_cores, parked.wal_mb) == (0, 0, 0)
    assert min(parked.replicas.values()) == 1


def test_a_round_has_its_commits_and_those_of_its_output() -> None:
    mix = Mix(rounds_per_minute=60, rounds_per_run=2, outputs_per_round=5, parked_share=0)
    found = plan(10, mix, MEASURED)
    assert found.rounds == 10
    run, tool_round, output = MEASURED.run.commits, MEASURED.tool_round.commits, MEASURED.output.commits
    assert found.commits == pytest.approx(5 * run + 5 * tool_round + 50 * output)


def test_the_simulated_commit_costs_what_the_plan_says() -> None:
    found = plan(1_000_000, Mix(), MEASURED)
    shard = shard_of(found, Mix())
    assert shard.utilisation(found.commits) * shard.cores == pytest.approx(found.database_cores)


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(map(float, range(1, 101))), 0.99) == 99.0
    assert percentile([1.0], 0.99) == 1.0
