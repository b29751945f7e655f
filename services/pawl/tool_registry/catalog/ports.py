"""The ports of the catalog: where definitions are kept, and what runs the tools of stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from pawl.chassis.ids import StoreId
from pawl.tool_registry.rules.definition import ToolVersion
from pawl.tool_registry.sdk.tool import Tool

T = TypeVar("T")


class TooCostly(Exception):
    """Something that strangers wrote takes more time or memory to work out than there is for it."""


class Helper(Protocol):
    """Evaluates untrusted input where it delays no other call."""

    async def run(self, store_id: StoreId, function: Callable[..., T], *arguments: Any, cpu_seconds: float) -> T:
        """Return what a function of a module returns, or raise what it raises; all of it can be pickled.

        Raises:
            TooCostly: it takes more processor time, or more memory than a helper has.
            Overloaded: too much of the store waits already.
            DependencyUnavailable: no helper can be started now.
        """


class ToolSource(Protocol):
    """Runs the tools of one kind of source, which stores have registered."""

    def tool(self, entry: ToolVersion) -> Tool[..., Any] | None:
        """Return what runs a version; None if its source is not there any more. Quick, and never fails."""
