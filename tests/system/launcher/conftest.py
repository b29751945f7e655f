"""Suites of stand-in services, started for real."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.launcher import SuiteOptions
from services.launcher.services import ServiceSpec

STAND_IN = Path(__file__).with_name("stand_in.py")


def stand_in(name: str, nats_user: str = "tool_registry") -> ServiceSpec:
    """A service without content."""
    return ServiceSpec(name=name, command=(sys.executable, str(STAND_IN)), nats_user=nats_user)


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
        return SuiteOptions(data=data, **{"stages": stages, "ready_seconds": 20.0, **BARE, **more})

    return make
