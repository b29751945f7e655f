"""The chart of a measurement as SVG with text elements, which browsers show and diffs can read."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from bench.figures import Point

_WIDTH: Final = 760
_LEFT: Final = 210
_RIGHT: Final = 90
_BAR: Final = 18
_STEP: Final = 26
_TITLE: Final = 40
_OURS: Final = "#1f5fbf"
_PLAIN: Final = "#9aa3ad"
_STYLE: Final = "text{font:13px sans-serif;fill:#222}.title{font-weight:bold}.small{font-size:11px;fill:#555}"


def draw(points: Sequence[Point], caption: str) -> str | None:
    """Return a chart with bars for the compared points, or None if there are no points."""
    parts: list[str] = []
    height = _TITLE
    for title in dict.fromkeys(point.title for point in points):
        chosen = [point for point in points if point.title == title]
        parts += _bars(chosen, height)
        height += _TITLE + _STEP * len(chosen)
    if not parts:
        return None
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img"><style>{_STYLE}</style>'
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>'
    )
    return "\n".join([head, _text(16, 22, caption, "small"), *parts, "</svg>"]) + "\n"


def _bars(points: Sequence[Point], top: int) -> list[str]:
    """Return a bar for each point, with the spread as a thin line."""
    most = max((point.spread[1] if point.spread else point.value) for point in points) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    found = [_text(16, top + 16, points[0].title, "title")]
    for number, point in enumerate(points):
        y = top + _TITLE - 12 + number * _STEP
        color = _OURS if point.series.startswith("Pawl") else _PLAIN
        end = _LEFT + point.value * scale
        found.append(_text(_LEFT - 8, y + 14, point.series, "", anchor="end"))
        found.append(f'<rect x="{_LEFT}" y="{y}" width="{point.value * scale:.1f}" height="{_BAR}" fill="{color}"/>')
        if point.spread:
            low, high = (_LEFT + bound * scale for bound in point.spread)
            found.append(_line(low, y + _BAR / 2, high, y + _BAR / 2, "#222"))
            end = max(end, high)
        found.append(_text(end + 6, y + 14, f"{point.value:.2f}"))
    return found


def _text(x: float, y: float, text: str, style: str = "", *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'
