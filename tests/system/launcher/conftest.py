"""Suites of stand-in services, started for real."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pawl.launcher import SuiteOptions
from tests.system.launcher.stand_ins import stand_in

BARE: dict[str, Any] = {"database_url": "postgresql://nowhere", "nats_url": "nats://nowhere", "scripted_model": False}
"""A suite without embedded servers."""


@pytest.fixture
def data() -> Iterator[Path]:
    """A data folder that does not exist yet.

    Not below pytest's own folder: each session of pytest closes that to other users, PostgreSQL's among them when
    started by root.
    """
    with tempfile.TemporaryDirectory(prefix="pawl-suite-") as folder:
        yield Path(folder) / "data"


@pytest.fixture
def options(data: Path) -> Callable[..., SuiteOptions]:
    """Options of a suite with two stages of stand-ins and nothing else, unless told otherwise."""

    def make(**more: Any) -> SuiteOptions:
        stages = ((stand_in("first"),), (stand_in("second"),))
        return SuiteOptions(data=data, **{"stages": stages, "ready_seconds": 120.0, **BARE, **more})

    return make
