"""Writes the tables of a measurement, its figures as JSON, and its chart."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil
from rich.console import Console
from rich.table import Table

from bench import chart
from bench.figures import Figure, NotMeasured, Point
from bench.options import Options

RESULTS: Final = Path(__file__).parent / "results"
_SYNCS: Final = 100
_FILE_WIDTH: Final = 150
_THOUSANDS_FROM: Final = 1000

Machine = dict[str, str | float]


def machine() -> Machine:
    """Return the conditions at the start of the measurement."""
    return {
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        # Each measured Pawl checks this when it starts.
        "postgresql_fsync": "on",
        "sync_milliseconds": round(_sync_milliseconds(), 2),
    }


def _sync_milliseconds() -> float:
    """Return the median time, in milliseconds, that the data disk takes to sync a page."""
    took = []
    with tempfile.TemporaryFile(buffering=0) as file:
        for _ in range(_SYNCS):
            file.write(bytes(8192))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took)


def write(
    found: Sequence[Figure | NotMeasured], machine: Machine, options: Options, *, whole: bool
) -> tuple[Path, ...]:
    """Write all figures, and a chart if there are points to draw. Return the files.

    Only the files of a `whole` measurement are named by the date alone, so that a partial measurement does not
    overwrite them.
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
    multiples = [figure for figure in found if isinstance(figure, Point) and not figure.unit]
    drawing = chart.draw(multiples, f"As multiples of the hand-written loop. {caption(machine)}")
    if drawing is None:
        return (file,)
    picture = file.with_suffix(".svg")
    picture.write_text(drawing, encoding="utf-8")
    return file, picture


def show(found: Sequence[Figure | NotMeasured], machine: Machine) -> None:
    """Print the figures, the comparison, and the figures that could not be measured."""
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
        ("As multiples of the hand-written loop: median and quartiles", [point for point in points if not point.unit]),
        ("In numbers: median and quartiles", [point for point in points if point.unit]),
    ):
        if wanted:
            console.print(_pivot(title, wanted))
    for point in points:
        if len(point.detail) > 1:
            console.print(f"{point.series}, {point.title}: {_detail(point)}")
    for missing in (missing for missing in found if isinstance(missing, NotMeasured)):
        console.print(f"{missing.code} is not measured: {missing.why}", markup=False)


def in_order(figures: Sequence[Figure]) -> list[Figure]:
    return sorted(figures, key=lambda figure: int(figure.code.removeprefix("P")))


def rows(figures: Sequence[Figure]) -> list[tuple[str, str, str, str, str]]:
    """Return a row for each figure, in target order: code, description, value, target and verdict."""
    return [(f.code, f.what, measured(f), f.target, verdict(f)) for f in in_order(figures)]


def measured(figure: Figure) -> str:
    """Return the value with its unit, and the range in parentheses."""
    return _with_range(f"{number(figure.value)} {figure.unit}".strip(), figure.spread)


def verdict(figure: Figure) -> str:
    """Return whether the target is met, by how much, and whether this is in doubt, or "" without a target."""
    if figure.met is None:
        return ""
    word = "met" if figure.met else "MISSED"
    if not figure.bound:
        return word
    is_in_doubt = figure.spread is not None and figure.spread[0] < figure.bound < figure.spread[1]
    return f"{word}, {number(figure.value / figure.bound)} of it" + (", within the spread" if is_in_doubt else "")


def number(value: float) -> str:
    """Format a number with a readable number of digits."""
    if abs(value) >= _THOUSANDS_FROM or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"  # noqa: PLR2004


def caption(machine: Machine) -> str:
    return (
        f"{machine['cores']} cores, Python {machine['python']}, Linux {machine['kernel']}, "
        f"fsync {machine['postgresql_fsync']}, a sync takes {machine['sync_milliseconds']} ms, "
        f"load {machine['load_average_at_start']} at the start"
    )


def _detail(figure: Figure) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in figure.detail.items())


def _pivot(title: str, points: Sequence[Point]) -> Table:
    """Return a table with a row for each series and a column for each figure."""
    columns = list(dict.fromkeys(point.title for point in points))
    cells = {(point.series, point.title): point for point in points}
    table = Table("", *columns, title=title)
    for series in dict.fromkeys(point.series for point in points):
        row = [cells.get((series, column)) for column in columns]
        table.add_row(series, *(_cell(point) if point else "" for point in row))
    return table


def _cell(point: Point) -> str:
    return _with_range(number(point.value), point.spread)


def _with_range(text: str, spread: tuple[float, float] | None) -> str:
    if spread is None or spread[0] == spread[1]:
        return text
    return f"{text} ({number(spread[0])} to {number(spread[1])})"
