"""The generated parts of the documentation are those of the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import diagrams


@pytest.mark.parametrize("path", diagrams.PAGES, ids=lambda path: path.name)
def test_the_pages_show_the_tables_that_are_enforced(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert "<!-- generated:" in page
    assert page == diagrams.rendered(page), 'run "make diagrams"'
