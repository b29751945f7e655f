"""A figure beside its target, and its row in the table."""

from __future__ import annotations

import pytest

from bench import report
from bench.figures import Figure, at_least, at_most


@pytest.mark.parametrize(("value", "met"), [(99.0, True), (100.0, True), (100.1, False)])
def test_a_figure_may_reach_its_upper_bound_and_not_exceed_it(value: float, met: bool) -> None:
    figure = at_most(100, code="P6", what="p99", value=value, unit="ms")
    assert (figure.met, figure.target) == (met, "at most 100 ms")


@pytest.mark.parametrize(("value", "met"), [(109.9, False), (110.0, True), (200.0, True)])
def test_a_figure_must_reach_its_lower_bound(value: float, met: bool) -> None:
    figure = at_least(110, code="P2", what="runs", value=value, unit="/s")
    assert (figure.met, figure.target) == (met, "at least 110 /s")


def test_rows_come_in_the_order_of_the_targets() -> None:
    figures = [Figure(code=code, what="", value=1, unit="") for code in ("P10", "P2", "P1")]
    assert [row[0] for row in report.rows(figures)] == ["P1", "P2", "P10"]


def test_a_row_says_by_how_much_a_target_is_missed() -> None:
    figure = at_most(2, code="P3", what="latency", value=5, unit="ms", spread=(3.21, 13.04))
    assert report.rows([figure]) == [("P3", "latency", "5 ms (3.21 to 13.0)", "at most 2 ms", "MISSED, 2.50 of it")]


@pytest.mark.parametrize(
    ("spread", "told"), [((1.5, 1.9), "met, 0.944 of it, within the spread"), ((1.6, 1.8), "met, 0.944 of it")]
)
def test_a_row_says_when_the_bound_lies_within_the_spread(spread: tuple[float, float], told: str) -> None:
    assert report.verdict(at_most(1.8, code="P1", what="p50", value=1.7, unit="", spread=spread)) == told


def test_a_row_without_a_target_judges_nothing() -> None:
    assert report.verdict(Figure(code="P9", what="growth", value=5, unit="MiB/h")) == ""


def test_a_target_that_is_no_number_is_met_or_missed() -> None:
    assert report.verdict(Figure(code="P7", what="", value=5, unit="", target="in words", met=True)) == "met"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (21, "21"), (0.0123, "0.0123"), (5.114, "5.11"), (19.14, "19.1"), (16175.4, "16,175")]
)
def test_numbers_have_as_many_places_as_one_can_read(value: float, text: str) -> None:
    assert report.number(value) == text
