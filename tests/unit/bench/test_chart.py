"""The chart is well-formed, and shows what was measured."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from bench import chart
from bench.figures import Point

SVG = "{http://www.w3.org/2000/svg}"


def bar(series: str, value: float, spread: tuple[float, float] | None = None) -> Point:
    return Point(code="P1", what="CPU a run", series=series, value=value, unit="ms", spread=spread)


def drawn(*points: Point) -> ET.Element:
    text = chart.draw(points, "2 cores")
    assert text is not None
    return ET.fromstring(text)  # noqa: S314  # our own


def texts(picture: ET.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def test_nothing_measured_gives_no_picture() -> None:
    assert chart.draw([], "2 cores") is None


def test_a_bar_is_as_long_as_its_value() -> None:
    picture = drawn(bar("pawl", 20), bar("other", 40))
    widths = [float(rect.get("width", "0")) for rect in picture.iter(f"{SVG}rect")][1:]
    assert widths[1] == pytest.approx(2 * widths[0])
    assert {"pawl", "other", "20.00", "40.00", "2 cores"} <= set(texts(picture))


def test_a_spread_stays_within_the_picture() -> None:
    picture = drawn(bar("pawl", 20, (10, 400)))
    ends = [float(line.get("x2", "0")) for line in picture.iter(f"{SVG}line")]
    assert max(ends) < float(picture.get("width", "0"))


def test_names_are_text_and_no_markup() -> None:
    assert "a <b> & c" in texts(drawn(bar("a <b> & c", 1)))
