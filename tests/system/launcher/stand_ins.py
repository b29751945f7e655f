"""Services without content, as data."""

from __future__ import annotations

import sys
from pathlib import Path

from pawl.launcher.services import ServiceSpec

_PROGRAM = Path(__file__).with_name("stand_in.py")


def stand_in(name: str) -> ServiceSpec:
    """A service that only starts, says that it is ready, and stops."""
    return ServiceSpec(name=name, command=(sys.executable, str(_PROGRAM)), role="tool_registry")
