"""Requests are made again while a dependency is away; that it is broken is believed after a while."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.retry import ANY, TRANSIENT, Failures, Retry, pause_seconds
from pawl.errors import (
    DeadlineExceeded,
    DependencyUnavailable,
    Internal,
    LeaseLost,
    Overloaded,
)


@dataclass(slots=True)
class _Clock:
    """A clock that is where it would be after each sleep."""

    time: float = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


@dataclass(slots=True)
class _Dependency:
    """Fails with one error after the other, then answers."""

    errors: Iterator[Exception]
    asked: int = 0

    async def ask(self) -> str:
        self.asked += 1
        for error in self.errors:
            raise error
        return "answer"


def _retry(clock: _Clock, **options: object) -> Retry:
    return Retry(clock, chance=lambda: 1.0, **options)  # type: ignore[arg-type]


async def test_a_dependency_may_be_away_for_any_time() -> None:
    for error in (DependencyUnavailable(), DeadlineExceeded(), Overloaded()):
        clock, failures_count = _Clock(), 500
        dependency = _Dependency(iter([error] * failures_count))
        assert await _retry(clock).until_answered(dependency.ask) == "answer"
        assert dependency.asked == failures_count + 1
        assert clock.time - 1000.0 > 3 * 180.0


async def test_a_broken_dependency_is_believed_after_a_while_since_it_was_last_away() -> None:
    for error, transient in ((Internal(), TRANSIENT), (OSError(), ANY)):
        clock = _Clock()
        retry = _retry(clock, transient=transient, internal_seconds_max=60.0)
        with pytest.raises(type(error)):
            await retry.until_answered(_Dependency(repeat(error)).ask)
        assert 60.0 <= clock.time - 1000.0 <= 62.0
    clock = _Clock()
    errors = iter([*[Internal()] * 30, DependencyUnavailable(), *[Internal()] * 30])
    assert await _retry(clock, internal_seconds_max=60.0).until_answered(_Dependency(errors).ask) == "answer"
    assert clock.time - 1000.0 > 60.0


async def test_what_is_no_fault_of_the_dependency_is_believed_at_once() -> None:
    dependency = _Dependency(repeat(LeaseLost()))
    with pytest.raises(LeaseLost):
        await _retry(_Clock()).until_answered(dependency.ask)
    assert dependency.asked == 1


async def test_all_attempts_together_take_no_longer_than_asked() -> None:
    clock = _Clock()
    with pytest.raises(DependencyUnavailable):
        await _retry(clock).until_answered(_Dependency(repeat(DependencyUnavailable())).ask, seconds_max=30.0)
    assert 30.0 <= clock.time - 1000.0 <= 32.0


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_pauses_grow_up_to_a_bound_and_are_never_nothing(failures: int, chance: float, other: float) -> None:
    pause = pause_seconds(failures, chance)
    assert 0.025 <= pause <= 2.0
    assert pause <= 2 * pause_seconds(failures + 1, other)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=30))
def test_it_is_broken_since_it_was_last_away(history: list[tuple[bool, float]]) -> None:
    failures, now, expected = Failures(), 0.0, math.inf
    for is_away, seconds in history:
        now += seconds
        failures = failures.then(DependencyUnavailable() if is_away else Internal(), now)
        expected = math.inf if is_away else min(expected, now)
    assert failures == Failures(count=len(history), broken_since=expected)
