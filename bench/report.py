"""The tables of a measurement, its figures as JSON, and its chart."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil
from rich.console import Console
from rich.table import Table

from bench import chart
from bench.comparison import CPU
from bench.figures import Figure, NotMeasured, Point
from bench.options import Options

RESULTS: Final = Path(__file__).parent / "results"
_FILE_WIDTH: Final = 150
_THOUSANDS_FROM: Final = 1000

Machine = dict[str, str | float]


def machine() -> Machine:
    """Return what the figures depend on, as it is before the measurement begins."""
    return {
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        # Each Pawl that is measured was asked for it when it had started.
        "postgresql_fsync": "on",
    }


def write(
    found: Sequence[Figure | NotMeasured], machine: Machine, options: Options, *, whole: bool
) -> tuple[Path, ...]:
    """Write all figures and, if there is something to draw, the chart; returns the files.

    Only a `whole` measurement gets the date alone for a name, so that a look at one part overwrites no record.
    """
    now = datetime.now(UTC)
    result = {
        "time": now.isoformat(timespec="seconds"),
        "machine": machine,
        "options": asdict(options),
        "figures": [asdict(figure) for figure in found if isinstance(figure, Figure)],
        "not_measured": [asdict(missing) for missing in found if isinstance(missing, NotMeasured)],
    }
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / (f"{now:%Y-%m-%d}.json" if whole else f"{now:%Y-%m-%d}-partial.json")
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    drawing = chart.draw([figure for figure in found if isinstance(figure, Point)], caption(machine))
    if drawing is None:
        return (file,)
    picture = file.with_suffix(".svg")
    picture.write_text(drawing, encoding="utf-8")
    return file, picture


def show(found: Sequence[Figure | NotMeasured], machine: Machine) -> None:
    """Print the table of figures, the comparison, the curves, and what could not be measured."""
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    points = [figure for figure in found if isinstance(figure, Point)]
    figures = [figure for figure in found if isinstance(figure, Figure) and not isinstance(figure, Point)]
    if figures:
        table = Table("", "figure", "measured", "target", "", title=caption(machine))
        for row in rows(figures):
            table.add_row(*row)
        console.print(table)
        for figure in in_order(figures):
            if figure.detail:
                console.print(
                    f"{figure.code} {figure.what}: {_detail(figure)}", style="dim", markup=False, highlight=False
                )
    for title, wanted in (
        ("The same work elsewhere", [point for point in points if point.at is None]),
        ("Curves", [point for point in points if point.at is not None]),
    ):
        if wanted:
            console.print(_pivot(title, wanted))
    for point in points:
        if point.what == CPU and len(point.detail) > 1:
            console.print(f"{point.series}, {CPU}: {_detail(point)}")
    for missing in (missing for missing in found if isinstance(missing, NotMeasured)):
        console.print(f"{missing.code} is not measured: {missing.why}", markup=False)


def in_order(figures: Sequence[Figure]) -> list[Figure]:
    """Return the figures in the order of the targets."""
    return sorted(figures, key=lambda figure: int(figure.code.removeprefix("P")))


def rows(figures: Sequence[Figure]) -> list[tuple[str, str, str, str, str]]:
    """Return a row for each figure, in the order of the targets: code, what, value, target, verdict."""
    return [(f.code, f.what, measured(f), f.target, verdict(f)) for f in in_order(figures)]


def measured(figure: Figure) -> str:
    """Return the value with its unit, and the range in brackets."""
    return _with_range(f"{number(figure.value)} {figure.unit}".strip(), figure.spread)


def verdict(figure: Figure) -> str:
    """Return whether the target is met, and how far away it is; empty where there is none."""
    if figure.met is None:
        return ""
    word = "met" if figure.met else "MISSED"
    return f"{word}, {number(figure.value / figure.bound)} of it" if figure.bound else word


def number(value: float) -> str:
    """Return a number with as many places as one can read."""
    if abs(value) >= _THOUSANDS_FROM or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"  # noqa: PLR2004


def caption(machine: Machine) -> str:
    """Return the machine in a line."""
    return (
        f"{machine['cores']} cores, Python {machine['python']}, Linux {machine['kernel']}, "
        f"fsync {machine['postgresql_fsync']}, load {machine['load_average_at_start']} at the start"
    )


def _detail(figure: Figure) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in figure.detail.items())


def _pivot(title: str, points: Sequence[Point]) -> Table:
    """Return a table with a row for each series, and for each place on its curve, and a column for each figure."""
    columns = list(dict.fromkeys(point.title for point in points))
    places = list(dict.fromkeys((point.series, point.at) for point in points))
    cells = {(point.series, point.at, point.title): point for point in points}
    table = Table("", *columns, title=title)
    for series, at in places:
        row = [cells.get((series, at, column)) for column in columns]
        name = series if at is None else f"{series}, {at:g}"
        table.add_row(name, *(_cell(point) if point else "" for point in row))
    return table


def _cell(point: Point) -> str:
    return _with_range(number(point.value), point.spread)


def _with_range(text: str, spread: tuple[float, float] | None) -> str:
    if spread is None or spread[0] == spread[1]:
        return text
    return f"{text} ({number(spread[0])} to {number(spread[1])})"
