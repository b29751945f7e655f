"""The table of docs/reliability.md says how much of each machine is played each time."""

from __future__ import annotations

import pytest

from tests.chaos.faults import SHORT
from tests.simulation.test_simulation import LONG_SEEDS, SHORT_SEEDS
from tests.system.background.test_deaths import EVERY, SOME
from tests.tidy import tree


@pytest.mark.parametrize(
    ("machine", "short", "long"),
    [
        (
            "simulation",
            f"{sum(count for _, count in SHORT_SEEDS)} seeds",
            f"{sum(count for _, count in LONG_SEEDS)} seeds",
        ),
        ("nemesis", "", f"{len(SHORT)} phases"),
        ("stories", "", f"{len(SOME)} of {len(EVERY)}"),
    ],
)
def test_the_table_says_how_much_is_played(machine: str, short: str, long: str) -> None:
    """In `make test` and in `make test-long`."""
    page = (tree.ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {machine} |"))
    assert [cell.strip() for cell in row.split("|")[-3:-1]] == [short, long]
