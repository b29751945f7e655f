"""Services without one fix, to check that the chaos tests find the fault.

`prepare` makes every service remove the fix at its start, before it imports anything of Pawl.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pawl.agent_loop.loop import drive
from pawl.server.db import database
from pawl.server.db import heartbeat as database_heartbeat
from tests.chaos.world import SERVICES


def prepare(folder: Path) -> Mapping[str, Mapping[str, str]]:
    start = folder / "unfixed"
    start.mkdir()
    # Python runs this file before anything else.
    (start / "sitecustomize.py").write_text("from tests.chaos import unfixed\nunfixed.believe_read_only()\n")
    root = Path(__file__).parents[2]
    ours = [str(start), str(root), str(root / "services"), str(root / "services/pawl-client")]
    return {service: {"PYTHONPATH": ":".join(ours)} for service in SERVICES}


def believe_read_only() -> None:
    """Make services treat a read-only database as an internal error and fail the run without retries."""
    module: Any = database
    module._UNFIT = ()
    module._UNUSABLE = database._UNREACHABLE
    heartbeat: Any = database_heartbeat
    heartbeat._IS_READ_ONLY = "SELECT false"
    driving: Any = drive
    driving.INTERNAL_SECONDS_MAX = 0.0
