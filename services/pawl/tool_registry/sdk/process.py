"""The limits of a tool that runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pawl.tool_registry.sdk.signature import ToolDefinitionError
from pawl.values import ExecutionContext

MEMORY_BYTES_MIN: Final = 1024 * 1024
MEMORY_BYTES_MAX: Final = 2**40
CPU_SECONDS_MIN: Final = 1
CPU_SECONDS_MAX: Final = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Each call runs in a fresh process, which may use so much. Its time is the tool's timeout.

    Raises:
        ToolDefinitionError: a limit is out of range.
    """

    memory_bytes: int = 512 * 1024 * 1024
    """Memory that a call may allocate, libraries that its module imports included; Linux only."""
    cpu_seconds: int = 60
    """Time of all its threads on processors, in whole seconds."""

    def __post_init__(self) -> None:
        _require(self.memory_bytes, MEMORY_BYTES_MIN, MEMORY_BYTES_MAX, "memory_bytes")
        _require(self.cpu_seconds, CPU_SECONDS_MIN, CPU_SECONDS_MAX, "cpu_seconds")


def _require(value: Any, least: int, most: int, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ToolDefinitionError(f"ProcessLimits: {name} must be a whole number from {least} to {most}")


def check_process(name: str, function: Callable[..., Any], context: ExecutionContext, limits: object) -> None:
    """Return if a function can run in a process of its own within these limits.

    Raises:
        ToolDefinitionError: these are no limits, another process could not find it, or it does not run in the registry
            at all.
    """
    if not isinstance(limits, ProcessLimits):
        raise ToolDefinitionError(f"{name}: process must be ProcessLimits(...)")
    if context is not ExecutionContext.BACKEND:
        raise ToolDefinitionError(f"{name}: only a BACKEND tool can have a process of its own")
    if "<locals>" in getattr(function, "__qualname__", ""):
        raise ToolDefinitionError(
            f"{name}: a function with a process of its own must stand at the top of its module, where that process"
            " can find it"
        )
