"""Lists on terminals of any width."""

from __future__ import annotations

import io

from rich.console import Console

from pawl.cli.runs import show_table

RUN = "run_83e30c686bd31f67a7daaca35a2ce881"
HEADINGS = ("run", "state", "next", "what")
ROWS = [(RUN, "waiting", "", "[bold] a long text " * 20), (RUN, "completed", "2026-11-24 14:00:00Z", "")]


def shown(width: int) -> list[str]:
    output = io.StringIO()
    show_table(Console(file=output, width=width, force_terminal=True, no_color=True, color_system=None), HEADINGS, ROWS)
    return [line.rstrip() for line in output.getvalue().splitlines()]


def test_a_wide_terminal_has_a_line_for_each_row() -> None:
    heading, first, second = shown(120)
    assert heading.split() == [*HEADINGS]
    assert first.startswith(f"{RUN}  waiting")
    assert "[bold] a long text" in first
    assert second == f"{RUN}  completed  2026-11-24 14:00:00Z"


def test_a_table_that_just_fits_cuts_nothing_but_the_last_column() -> None:
    _, first, second = shown(79)
    assert first.startswith(f"{RUN}  waiting                          [bold]")
    assert second == f"{RUN}  completed  2026-11-24 14:00:00Z"


def test_no_id_and_no_time_is_cut_on_a_narrow_terminal() -> None:
    for width in (20, 40, 78):
        lines = shown(width)
        assert lines.count(RUN) == 2
        assert lines[-2:] == ["  state: completed", "  next: 2026-11-24 14:00:00Z"]
        assert lines[1] == "  state: waiting"
