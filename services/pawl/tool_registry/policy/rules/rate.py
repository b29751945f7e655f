"""The rate at which calls may begin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from pawl.tool_registry.rules.execution import ExecutionResult, ended_badly
from pawl.values import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """So many a minute: on average, and as many at once after a minute of quiet. `name` is unique in a store."""

    name: str
    per_minute: int


@dataclass(eq=False)
class Exceeded(Exception):
    """A rate lets no more begin for so many seconds."""

    rate: Rate
    wait_seconds: float


STORE_RATE_NAME: Final = "store"


def rate_limited(tool_name: str, exceeded: Exceeded) -> ExecutionResult:
    """Return the result of a call that was not begun because too many were."""
    what = "Calls of all tools in this store" if exceeded.rate.name == STORE_RATE_NAME else f"Calls of {tool_name}"
    wait = max(1, math.ceil(exceeded.wait_seconds))
    return ended_badly(
        Outcome.FAILED,
        "RATE_LIMITED",
        f"{what} are limited to {exceeded.rate.per_minute} a minute. Nothing was done. Try again in {wait} s.",
    )
