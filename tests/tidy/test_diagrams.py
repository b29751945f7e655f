"""The state diagrams in the documentation are those of the tables."""

from __future__ import annotations

from docs import diagrams


def test_the_diagrams_show_the_tables_that_are_enforced() -> None:
    page = diagrams.PAGE.read_text(encoding="utf-8")
    assert page == diagrams.rendered(page), 'run "make diagrams"'
