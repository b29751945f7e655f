"""How a load is offered, and what became of it is counted."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from bench import load
from bench.load import Outcome, Place


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


@pytest.mark.parametrize(
    ("refusal", "typed"),
    [("QUEUE_FULL", True), ("watch: OVERLOADED", True), ("untyped CANCELLED", False), ("ended as RUN_STATE_X", False)],
)
def test_a_refusal_is_typed_if_it_has_a_reason(refusal: str, typed: bool) -> None:
    assert outcome(refusal).is_typed == typed


def test_refusals_are_counted_by_reason_and_only_completed_runs_have_a_duration() -> None:
    outcomes = [outcome("QUEUE_FULL"), outcome("QUEUE_FULL"), outcome("OVERLOADED"), outcome(), outcome(ended=3.0)]
    assert load.refusals(outcomes) == {"QUEUE_FULL": 2, "OVERLOADED": 1}
    assert load.durations(outcomes) == [2.0]
