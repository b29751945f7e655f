"""Each checker finds its planted fault, and none finds anything in a good record."""

from __future__ import annotations

from tests.chaos.checkers import CHECKERS, judge
from tests.chaos.history import Kind
from tests.chaos.mutants import MUTANTS, hunt
from tests.chaos.play import too_little
from tests.chaos.story import good_record


def test_checkers_accept_a_good_record() -> None:
    assert judge(good_record()) == []


def test_each_checker_alone_finds_its_planted_fault() -> None:
    assert [name for name in MUTANTS if not hunt(name)] == []
    assert sorted(MUTANTS) == sorted(checker.__name__ for checker in CHECKERS)


def test_a_chaos_game_with_too_few_operations_does_not_count() -> None:
    assert list(too_little(good_record(), {Kind.START: 3})) == []
    assert list(too_little(good_record(), {Kind.START: 4}))
