"""Each checker of the nemesis finds the fault that is planted for it, and none finds anything in a good record."""

from __future__ import annotations

import pytest

from tests.chaos.checkers import CHECKERS, judge
from tests.chaos.history import Kind
from tests.chaos.mutants import MUTANTS, hunt
from tests.chaos.play import too_little
from tests.chaos.story import told


def test_nothing_is_wrong_with_a_good_record() -> None:
    assert judge(told()) == []


@pytest.mark.parametrize("checker", [checker.__name__ for checker in CHECKERS])
def test_a_planted_fault_is_found_by_its_checker_alone(checker: str) -> None:
    assert hunt(checker)


def test_a_mutant_is_there_for_every_checker_and_no_other() -> None:
    assert sorted(MUTANTS) == sorted(checker.__name__ for checker in CHECKERS)


def test_a_game_with_too_few_operations_does_not_count() -> None:
    assert list(too_little(told(), {Kind.START: 3})) == []
    assert list(too_little(told(), {Kind.START: 4}))
