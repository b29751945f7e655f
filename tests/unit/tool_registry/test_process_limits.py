"""What a tool may say of a process of its own. TOOL-9."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.tools import ExecutionContext, ProcessLimits, ToolDefinitionError, tool
from tests.tables import for_each


@for_each(
    "limits",
    [
        {"memory_bytes": 0},
        {"memory_bytes": 2**41},
        {"memory_bytes": 1e9},
        {"cpu_seconds": 0},
        {"cpu_seconds": 0.5},
        {"cpu_seconds": True},
        {"cpu_seconds": 100_000},
    ],
)
def test_limits_are_whole_numbers_within_bounds(limits: dict[str, Any]) -> None:
    (name,) = limits
    with pytest.raises(ToolDefinitionError, match=rf"ProcessLimits: {name} must be a whole number from 1"):
        ProcessLimits(**limits)


def top() -> str:
    """Be at the top."""
    return "top"


def test_a_function_that_another_process_cannot_find_is_refused() -> None:
    def inner() -> str:
        """Be within."""
        return "inner"

    with pytest.raises(ToolDefinitionError, match="inner: a function with a process of its own must stand at the top"):
        tool(process=ProcessLimits())(inner)


def test_only_what_runs_in_the_registry_has_a_process() -> None:
    with pytest.raises(ToolDefinitionError, match="top: only a BACKEND tool can have a process of its own"):
        tool(process=ProcessLimits(), context=ExecutionContext.HUMAN)(top)
