"""The arithmetic of benchmarks: figures, differences, loads, slices and plans."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Self

import pytest

from bench import comparison, load, report
from bench.comparison import ALONE, CROWD, SLOW
from bench.differences import difference
from bench.figures import Figure, NotMeasured, at_least, at_most
from bench.load import Outcome, Place
from bench.percentiles import percentile
from bench.plan import MEASURED, Mix, plan
from bench.shards import Shard, bounded, grown, loads, moved, rendezvous, simulate, with_largest, zipf_weights
from bench.slices import CPU, Slice, ratios, shown, take_turns


def test_a_figure_is_judged_by_its_bound_and_says_by_how_much_it_misses_it() -> None:
    def upper(value: float, spread: tuple[float, float] | None = None) -> str:
        return report.verdict(at_most(100, code="P6", what="p99", value=value, unit="ms", spread=spread))

    assert [upper(value).partition(",")[0] for value in (99.0, 100.0, 100.1)] == ["met", "met", "MISSED"]
    lower = [at_least(110, code="P2", what="runs", value=value, unit="/s").met for value in (109.9, 110.0, 200.0)]
    assert lower == [False, True, True]
    assert upper(250.0) == "MISSED, 2.50 of it"
    assert upper(99.0, (90.0, 101.0)).endswith("within the spread")
    assert report.verdict(Figure(code="P9", what="growth", value=5, unit="MiB/h")) == "", "no target, no verdict"


def test_rows_come_in_the_order_of_the_targets_with_numbers_that_one_can_read() -> None:
    figures = [Figure(code=code, what="", value=1, unit="") for code in ("P10", "P2", "P1")]
    assert [row[0] for row in report.rows(figures)] == ["P1", "P2", "P10"]
    numbers = {0: "0", 21: "21", 0.0123: "0.0123", 5.114: "5.11", 19.14: "19.1", 16175.4: "16,175"}
    assert {value: report.number(value) for value in numbers} == numbers


CHOOSER = random.Random(7)
TIMES = [CHOOSER.expovariate(1.0) for _ in range(1000)]


def test_equal_kinds_cannot_be_told_apart() -> None:
    found = difference(TIMES, TIMES)
    assert (found.median_seconds, found.chance, found.by_luck) == (0.0, 0.5, 1.0)
    assert found.low_seconds < 0 < found.high_seconds


def test_a_kind_that_always_takes_longer_does() -> None:
    found = difference([each + 100 for each in TIMES], TIMES)
    assert found.median_seconds == pytest.approx(100)
    assert found.low_seconds <= 100 <= found.high_seconds
    assert found.chance == 1.0
    assert found.by_luck < 1e-9


def test_a_small_shift_among_chance_is_seen_by_many() -> None:
    other = [CHOOSER.expovariate(1.0) + 0.2 for _ in range(1000)]
    assert difference(other, TIMES).by_luck < 0.001


def outcome(refusal: str = "", *, ended: float | None = None) -> Outcome:
    return Outcome(place=Place(), began=1.0, answered=1.5, accepted=not refusal, ended=ended, refusal=refusal)


async def test_as_many_are_done_as_were_asked_for_and_never_more_at_once() -> None:
    under_way = most = 0

    async def work(_: float) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return 1

    assert sum(await load.at_once(4, work, count=50)) == 50
    assert most == 4


async def test_at_a_rate_each_is_due_one_interval_after_the_other_however_long_they_take() -> None:
    async def work(_: int, due: float) -> float:
        return due

    dues = await load.at_rate(1000, 0.02, work)
    assert len(dues) == 20
    gaps = [then - now for now, then in pairwise(dues)]
    assert gaps == pytest.approx([0.001] * 19)


def test_refusals_are_counted_by_reason_and_only_completed_runs_have_a_duration() -> None:
    refusals = {
        "QUEUE_FULL": True,
        "watch: OVERLOADED": True,
        "untyped CANCELLED": False,
        "ended as RUN_STATE_X": False,
    }
    assert {refusal: outcome(refusal).is_typed for refusal in refusals} == refusals
    outcomes = [outcome("QUEUE_FULL"), outcome("QUEUE_FULL"), outcome("OVERLOADED"), outcome(), outcome(ended=3.0)]
    assert load.refusals(outcomes) == {"QUEUE_FULL": 2, "OVERLOADED": 1}
    assert load.durations(outcomes) == [2.0]


class Logged:
    """A subject that takes no time, and notes when it was asked for what."""

    def __init__(self, name: str, log: list[tuple[str, int, int]]) -> None:
        self.name = name
        self._log = log

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave nothing behind."""

    async def run(self, count: int, at_once: int) -> list[float]:
        self._log.append((self.name, count, at_once))
        return [0.003, 0.001, 0.002]

    def processes(self) -> Mapping[str, int]:
        return {}


def slice_of(cpu: float, *, client: float = 0.0, rate: float = 1.0, p50: float = 1.0) -> Slice:
    parts = {"one": cpu / 4, "other": cpu * 3 / 4}
    return Slice(cpu=parts, client=client, runs_per_second=rate, p50_milliseconds=p50)


async def test_every_other_turn_goes_backwards() -> None:
    log: list[tuple[str, int, int]] = []
    found = await take_turns({name: Logged(name, log) for name in "abc"}, 3, runs=7, at_once=2)
    assert "".join(name for name, _, _ in log) == "abccbaabc"
    assert {(count, at_once) for _, count, at_once in log} == {(7, 2)}
    assert {name: len(slices) for name, slices in found.items()} == {"a": 3, "b": 3, "c": 3}
    assert found["a"][0].p50_milliseconds == pytest.approx(2.0)


def test_what_slows_the_machine_for_a_turn_does_not_move_a_ratio() -> None:
    slow = (1.0, 5.0, 1.1, 9.0)
    found = ratios([slice_of(30 * s) for s in slow], [slice_of(20 * s) for s in slow], CPU)
    assert shown(found) == {"value": pytest.approx(1.5), "spread": (pytest.approx(1.5), pytest.approx(1.5))}


def seen(p50: float, cpu: float, rate: float) -> dict[str, comparison.Slices]:
    """Show Pawl so, half of the CPU its client's; the hand-written loop as one of all, Restate as half as fast."""
    slices = {
        "pawl": [slice_of(cpu / 2, client=cpu / 2, rate=rate, p50=p50)],
        "handwritten": [slice_of(1)],
        "restate": [slice_of(2, rate=0.5, p50=2)],
    }
    return dict.fromkeys((ALONE, CROWD, SLOW), slices)


NAMES = {"pawl": "Pawl", "handwritten": "hand-written loop", "restate": "Restate"}


def verdicts(seen: dict[str, comparison.Slices]) -> list[bool | None]:
    return [figure.met for figure in comparison.judged(NAMES, seen) if isinstance(figure, Figure)]


def test_pawl_is_judged_by_the_hand_written_loop_and_by_restate() -> None:
    assert verdicts(seen(p50=1.8, cpu=0.9, rate=1.5)) == [True] * 7
    assert verdicts(seen(p50=2.6, cpu=2.1, rate=0.9)) == [False] * 7


def test_without_those_that_it_is_judged_by_nothing_is_said() -> None:
    alone = {load: {"pawl": slices["pawl"]} for load, slices in seen(1, 1, 1).items()}
    assert all(isinstance(found, NotMeasured) for found in comparison.judged(NAMES, alone))
    assert not [point for point in comparison.points(NAMES, alone) if not point.unit]


STORES = 2000


def test_the_weights_of_all_stores_add_up_to_one() -> None:
    giant = with_largest(zipf_weights(STORES, 0.6), 0.25)
    assert giant[0] == 0.25
    assert math.fsum(giant) == pytest.approx(1) == math.fsum(zipf_weights(STORES, 1.4))


def test_every_store_is_placed_and_no_shard_is_over_the_bound_but_for_one_large_store() -> None:
    shards = 16
    for exponent, slack in itertools.product((0.0, 0.8, 1.4), (0.02, 0.5)):
        weights = zipf_weights(STORES, exponent)
        placement = bounded(weights, shards, slack=slack)
        assert sorted(placement) == list(range(STORES))
        for shard, found in enumerate(loads(placement, weights, shards)):
            largest = max(weights[store] for store, where in placement.items() if where == shard)
            assert found <= max((1 + slack) / shards, 1 / shards + largest) + 1e-9


def test_with_a_directory_only_what_was_too_much_moves() -> None:
    weights = zipf_weights(STORES, 0.6)
    before = bounded(weights, 10, slack=0.1)
    after = grown(before, weights, 11, slack=0.1)
    old = loads(before, weights, 10)
    assert all(old[before[store]] > 1.1 / 11 for store in moved(before, after))
    assert max(loads(after, weights, 11)) <= 1.1 / 11 + 1e-9
    assert len(moved(before, after)) < len(moved(rendezvous(STORES, 10), rendezvous(STORES, 11)))


def test_one_server_waits_as_the_formula_of_pollaczek_and_khinchine_says() -> None:
    shard = Shard(cores=1, commit_cpu_ms=1.0, disk_ms=0.0, variation=1.0)
    busy = 0.5
    latencies = simulate(shard, busy * 1000, commits=200_000, seed=1)
    mean = math.fsum(latencies) / len(latencies)
    assert mean == pytest.approx(1 + busy * (1 + shard.variation**2) / (2 * (1 - busy)), rel=0.05)


def test_a_thousand_times_the_runs_need_a_thousand_times_the_rest() -> None:
    small, large = (plan(runs, Mix(), MEASURED) for runs in (1_000, 1_000_000))
    for name in ("commits", "events", "database_cores", "wal_mb", "disk_gb_a_day", "nats_messages", "streams_gib"):
        assert getattr(large, name) == pytest.approx(1000 * getattr(small, name))
    assert large.databases * Mix().database_cores * Mix().utilisation_max >= large.database_cores


def test_a_round_has_its_commits_and_those_of_its_output() -> None:
    mix = Mix(rounds_per_minute=60, rounds_per_run=2, outputs_per_round=5, parked_share=0)
    found = plan(10, mix, MEASURED)
    assert found.rounds == 10
    run, tool_round, output = MEASURED.run.commits, MEASURED.tool_round.commits, MEASURED.output.commits
    assert found.commits == pytest.approx(5 * run + 5 * tool_round + 50 * output)


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(map(float, range(1, 101))), 0.99) == 99.0
    assert percentile([1.0], 0.99) == 1.0
