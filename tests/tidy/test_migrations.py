"""The migrations of every schema can be applied: each has a number of its own, without gaps."""

from __future__ import annotations

from pathlib import Path

import pytest

from pawl.chassis.migrations import read_migrations
from tests.tidy import tree

FOLDERS = sorted((tree.PAWL).glob("*/adapters/sql/migrations"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parents[2].name)
def test_migrations_are_numbered_without_gaps(folder: Path) -> None:
    assert read_migrations(folder)
