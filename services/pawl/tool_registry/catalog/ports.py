"""The catalog's interfaces to helper processes and tool sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from pawl.chassis.ids import StoreId
from pawl.tools.rules.definition import ToolVersion
from pawl.tools.sdk.tool import Tool

T = TypeVar("T")


class TooCostly(Exception):
    """Raised when processing untrusted input exceeds the CPU or memory limit."""


class Helper(Protocol):
    """Processes untrusted input without delaying other calls."""

    async def run(self, store_id: StoreId, function: Callable[..., T], *arguments: Any, cpu_seconds: float) -> T:
        """Call a module-level function with picklable arguments. Return its result or raise its exception.

        Raises:
            TooCostly: The call exceeded its CPU time limit or the helper's memory limit.
            Overloaded: The store has too many calls queued.
            DependencyUnavailable: No helper process can be started.
        """


class ToolSource(Protocol):
    """Provides runners for tools that were registered through one kind of source."""

    def tool(self, entry: ToolVersion) -> Tool[..., Any] | None:
        """Return a version's runner, or None if its source was removed. This is fast and never raises."""
