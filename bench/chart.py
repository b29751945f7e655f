"""The chart of a measurement: SVG with text elements, which any browser shows and a diff can read."""

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
_CURVE: Final = 220
_COLORS: Final = ("#1f5fbf", "#c2571a", "#2a8c4a", "#8a3fa0")
_PLAIN: Final = "#9aa3ad"
_STYLE: Final = "text{font:13px sans-serif;fill:#222}.title{font-weight:bold}.small{font-size:11px;fill:#555}"


def draw(points: Sequence[Point], caption: str) -> str | None:
    """Return the picture: bars for what is compared, a curve for what has places; None if there is nothing to draw."""
    parts: list[str] = []
    height = _TITLE
    for what in dict.fromkeys(point.what for point in points if point.at is None):
        chosen = [point for point in points if point.what == what and point.at is None]
        parts += _bars(chosen, height)
        height += _TITLE + _STEP * len(chosen)
    for what in dict.fromkeys(point.what for point in points if point.at is not None):
        parts += _curve([point for point in points if point.what == what and point.at is not None], height)
        height += _TITLE + _CURVE + _TITLE
    if not parts:
        return None
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img"><style>{_STYLE}</style>'
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>'
    )
    return "\n".join([head, _text(16, 22, caption, "small"), *parts, "</svg>"]) + "\n"


def _bars(points: Sequence[Point], top: int) -> list[str]:
    """Return a bar for each point, and its spread as a thin line."""
    most = max((point.spread[1] if point.spread else point.value) for point in points) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    found = [_text(16, top + 16, points[0].title, "title")]
    for number, point in enumerate(points):
        y = top + _TITLE - 12 + number * _STEP
        color = _COLORS[0] if point.series == "pawl" else _PLAIN
        end = _LEFT + point.value * scale
        found.append(_text(_LEFT - 8, y + 14, point.series, "", anchor="end"))
        found.append(f'<rect x="{_LEFT}" y="{y}" width="{point.value * scale:.1f}" height="{_BAR}" fill="{color}"/>')
        if point.spread:
            low, high = (_LEFT + bound * scale for bound in point.spread)
            found.append(_line(low, y + _BAR / 2, high, y + _BAR / 2, "#222"))
            end = max(end, high)
        found.append(_text(end + 6, y + 14, f"{point.value:.1f}"))
    return found


def _curve(points: Sequence[Point], top: int) -> list[str]:
    """Return a line for each series over equally wide steps, since each place is about twice the one before."""
    places = sorted({point.at for point in points if point.at is not None})
    most = max(point.value for point in points) or 1.0
    left, right, base = 60, _WIDTH - 140, top + _TITLE + _CURVE
    xs = {place: left + (right - left) * n / max(1, len(places) - 1) for n, place in enumerate(places)}
    found = [
        _text(16, top + 16, points[0].title, "title"),
        _line(left, base, right, base, "#222"),
        *(_text(x, base + 18, f"{place:g}", "small", anchor="middle") for place, x in xs.items()),
    ]
    for share in (0.0, 0.5, 1.0):
        y = base - share * _CURVE
        found.append(_line(left, y, right, y, "#ddd"))
        found.append(_text(left - 6, y + 4, f"{share * most:.0f}", "small", anchor="end"))
    for series, color in zip(dict.fromkeys(point.series for point in points), _COLORS, strict=False):
        line = sorted((p.at, p.value) for p in points if p.series == series and p.at is not None)
        places_drawn = [(xs[at], base - value / most * _CURVE) for at, value in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places_drawn)
        found.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        found += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places_drawn]
        number = list(dict.fromkeys(point.series for point in points)).index(series)
        found.append(_line(right + 14, top + _TITLE + 20 * number, right + 34, top + _TITLE + 20 * number, color))
        found.append(_text(right + 40, top + _TITLE + 4 + 20 * number, series, "small"))
    return found


def _text(x: float, y: float, text: str, style: str = "", *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'
