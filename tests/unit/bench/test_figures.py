"""Arithmetic of benchmarks: figures, differences, loads, slices and plans."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from bench import comparison, load, report
from bench.comparison import ALONE, CROWD, SLOW
from bench.differences import difference
from bench.figures import Figure, NotMeasured, at_least, at_most
from bench.load import Outcome, Owner
from bench.slices import CPU, Slice, ratios, shown


def test_a_verdict_reports_how_far_a_figure_misses_its_target() -> None:
    def upper(value: float, spread: tuple[float, float] | None = None) -> str:
        return report.verdict(at_most(100, code="P6", what="p99", value=value, unit="ms", spread=spread))

    assert [upper(value).partition(",")[0] for value in (99.0, 100.0, 100.1)] == ["met", "met", "MISSED"]
    lower = [at_least(110, code="P2", what="runs", value=value, unit="/s").met for value in (109.9, 110.0, 200.0)]
    assert lower == [False, True, True]
    assert upper(250.0) == "MISSED, 2.50 of it"
    assert upper(99.0, (90.0, 101.0)).endswith("within the spread")
    assert report.verdict(Figure(code="P9", what="growth", value=5, unit="MiB/h")) == "", "no target, no verdict"


def test_rows_are_in_target_order_with_readable_numbers() -> None:
    figures = [Figure(code=code, what="", value=1, unit="") for code in ("P10", "P2", "P1")]
    assert [row[0] for row in report.rows(figures)] == ["P1", "P2", "P10"]
    numbers = {0: "0", 21: "21", 0.0123: "0.0123", 5.114: "5.11", 19.14: "19.1", 16175.4: "16,175"}
    assert {value: report.number(value) for value in numbers} == numbers


CHOOSER = random.Random(7)
TIMES = [CHOOSER.expovariate(1.0) for _ in range(1000)]


def test_equal_samples_show_no_difference() -> None:
    found = difference(TIMES, TIMES)
    assert (found.median_seconds, found.chance, found.by_luck) == (0.0, 0.5, 1.0)
    assert found.low_seconds < 0 < found.high_seconds


def test_a_sample_that_always_takes_longer_is_detected() -> None:
    found = difference([each + 100 for each in TIMES], TIMES)
    assert found.median_seconds == pytest.approx(100)
    assert found.low_seconds <= 100 <= found.high_seconds
    assert found.chance == 1.0
    assert found.by_luck < 1e-9


def test_many_samples_reveal_a_small_shift() -> None:
    assert difference([CHOOSER.expovariate(1.0) + 0.2 for _ in range(1000)], TIMES).by_luck < 0.001


def outcome(refusal: str = "", *, ended: float | None = None) -> Outcome:
    return Outcome(place=Owner(), began=1.0, answered=1.5, accepted=not refusal, ended=ended, refusal=refusal)


async def test_the_load_keeps_its_count_and_concurrency() -> None:
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


async def test_a_fixed_rate_keeps_its_interval_regardless_of_call_duration() -> None:
    async def work(_: int, due: float) -> float:
        return due

    dues = await load.at_rate(1000, 0.02, work)
    assert [then - now for now, then in pairwise(dues)] == pytest.approx([0.001] * 19)


def test_refusals_are_counted_by_reason_and_only_completed_runs_are_timed() -> None:
    refusals = {
        "QUEUE_FULL": True,
        "watch: OVERLOADED": True,
        "untyped CANCELLED": False,
        "ended as RUN_STATE_X": False,
    }
    assert {refusal: outcome(refusal).is_typed for refusal in refusals} == refusals
    outcomes = [outcome("QUEUE_FULL"), outcome("QUEUE_FULL"), outcome("OVERLOADED"), outcome(), outcome(ended=3.0)]
    assert (load.refusals(outcomes), load.durations(outcomes)) == ({"QUEUE_FULL": 2, "OVERLOADED": 1}, [2.0])


def slice_of(cpu: float, *, client: float = 0.0, rate: float = 1.0, p50: float = 1.0) -> Slice:
    return Slice(cpu={"one": cpu / 4, "other": cpu * 3 / 4}, client=client, runs_per_second=rate, p50_milliseconds=p50)


def test_a_temporarily_slow_machine_does_not_change_a_ratio() -> None:
    slow = (1.0, 5.0, 1.1, 9.0)
    found = ratios([slice_of(30 * s) for s in slow], [slice_of(20 * s) for s in slow], CPU)
    assert shown(found) == {"value": pytest.approx(1.5), "spread": (pytest.approx(1.5), pytest.approx(1.5))}


def seen(p50: float, cpu: float, rate: float) -> dict[str, comparison.Slices]:
    """Return slices of Pawl with these figures, of the hand-written loop and of Restate.

    Half of Pawl's CPU time is the client's.
    """
    slices = {
        "pawl": [slice_of(cpu / 2, client=cpu / 2, rate=rate, p50=p50)],
        "handwritten": [slice_of(1)],
        "restate": [slice_of(2, rate=0.5, p50=2)],
    }
    return dict.fromkeys((ALONE, CROWD, SLOW), slices)


NAMES = {"pawl": "Pawl", "handwritten": "hand-written loop", "restate": "Restate"}


def verdicts(seen: dict[str, comparison.Slices]) -> list[bool | None]:
    return [figure.met for figure in comparison.judged(NAMES, seen) if isinstance(figure, Figure)]


def test_pawl_is_compared_with_the_hand_written_loop_and_restate() -> None:
    assert verdicts(seen(p50=1.8, cpu=0.9, rate=1.5)) == [True] * 7
    assert verdicts(seen(p50=2.6, cpu=2.3, rate=0.9)) == [False] * 7


def test_without_a_baseline_there_is_no_verdict() -> None:
    alone = {load: {"pawl": slices["pawl"]} for load, slices in seen(1, 1, 1).items()}
    assert all(isinstance(found, NotMeasured) for found in comparison.judged(NAMES, alone))
    assert not [point for point in comparison.points(NAMES, alone) if not point.unit]
