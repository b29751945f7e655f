"""Those that are compared take turns, and are compared slice by slice."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Self

import pytest

from bench import comparison
from bench.comparison import ALONE, CROWD, SLOW
from bench.figures import Figure, NotMeasured
from bench.slices import CPU, CPU_AND_CLIENT, P50, RATE, Slice, cpu_by_process, ratios, shown, take_turns


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


class Busy(Logged):
    """A subject whose client takes 10 ms of CPU a run."""

    async def run(self, count: int, at_once: int) -> list[float]:
        until = time.process_time() + 0.01 * count
        while time.process_time() < until:
            pass
        return [0.01] * count


async def test_what_the_client_takes_is_told_from_what_its_subject_takes() -> None:
    found = await take_turns({"a": Busy("a", [])}, 1, runs=2, at_once=1)
    assert CPU(found["a"][0]) == 0
    assert CPU_AND_CLIENT(found["a"][0]) >= 10


def test_what_slows_the_machine_for_a_turn_does_not_move_a_ratio() -> None:
    slow = (1.0, 5.0, 1.1, 9.0)
    found = ratios([slice_of(30 * s) for s in slow], [slice_of(20 * s) for s in slow], CPU)
    assert shown(found) == {"value": pytest.approx(1.5), "spread": (pytest.approx(1.5), pytest.approx(1.5))}


def test_one_turn_out_of_many_does_not_move_the_quartiles() -> None:
    assert shown([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 1000.0])["spread"] == (2.0, 6.0)


def test_cpu_by_process_adds_up() -> None:
    assert cpu_by_process([slice_of(8), slice_of(4), slice_of(12)]) == {"one": 2.0, "other": 6.0, "client": 0.0}


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


def test_each_subject_is_shown_in_multiples_and_in_numbers() -> None:
    found = {(p.series, p.what, p.unit): p.value for p in comparison.points(NAMES, seen(p50=3, cpu=2, rate=4))}
    assert found["Pawl", "p50 alone", ""] == 3
    assert found["Restate", "runs a second in a crowd", ""] == 0.5
    assert found["Restate", "runs a second in a crowd", "/s"] == 0.5
    assert (P50(slice_of(1, p50=7)), RATE(slice_of(1, rate=8))) == (7, 8)
