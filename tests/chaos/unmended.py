"""The suite as it was before a mend, for the nemesis to find what the mend is for.

Each function takes one mend out of the process that calls it, before anything of Pawl is imported. `prepare` has
every service do so at its start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pawl.chassis
from pawl.agent_loop.app import drive, worker
from pawl.chassis import database, database_heartbeat
from pawl.errors import Cancelled, DeadlineExceeded, LeaseLost, Overloaded, RunEnded, RunNotFound, Unavailable
from tests.chaos.world import SERVICES

VARIABLE = "CHAOS_UNMENDED"

# What python runs before anything else.
_START = f"import os\nfrom tests.chaos import unmended\nunmended.apply(os.environ[{VARIABLE!r}])\n"


def prepare(name: str, folder: Path) -> Mapping[str, Mapping[str, str]]:
    """Return what to add to the environment of the services; writes into `folder`."""
    start = folder / "unmended"
    start.mkdir()
    (start / "sitecustomize.py").write_text(_START)
    ours = [str(start), str(Path(__file__).parents[2]), str(Path(pawl.chassis.__path__[0]).parents[1])]
    return {service: {VARIABLE: name, "PYTHONPATH": ":".join(ours)} for service in SERVICES}


def apply(name: str) -> None:
    """Take out the mends of that name."""
    for take_out in UNMENDED[name]:
        take_out()


def believe_read_only() -> None:
    """Take a database that takes no writes for a fault of the program, and believe it at once."""
    module: Any = database
    module._UNFIT = ()
    module._UNUSABLE = database._UNREACHABLE
    heartbeat: Any = database_heartbeat
    heartbeat._IS_READ_ONLY = "SELECT false"
    driving: Any = drive
    driving.INTERNAL_SECONDS_MAX = 0.0


def keep_crashed() -> None:
    """Keep the claim of a run that could neither be driven nor given up, and renew it."""
    mended: Any = worker.Worker

    async def give_up(self: Any, claim: Any) -> str:
        try:
            await self._ledger.report_crash(claim)
        except (LeaseLost, RunEnded, RunNotFound):
            return "lost"
        except (Unavailable, DeadlineExceeded, Cancelled, Overloaded):
            return "crashed"
        return "given_up"

    def forget(self: Any, claim: Any, ended: asyncio.Task[str]) -> None:
        how = "lost" if ended.cancelled() else ended.result()
        del self._held[claim]
        self._meter.runs_held(len(self._held))
        self._meter.run_left(how)
        self._work_may_be_there.set()

    mended._give_up = give_up
    mended._forget = forget
    mended._has_driven = lambda self, claim, _: claim in self._held


UNMENDED: Mapping[str, tuple[Callable[[], None], ...]] = {
    "nobody_saw_what_never_should_be_seen": (believe_read_only,),
    "runs_end": (believe_read_only, keep_crashed),
}
"""What to take out, by the checker that must find it."""
