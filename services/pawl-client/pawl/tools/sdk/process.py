"""Resource limits for tools that run in their own process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pawl.tools.sdk.signature import ToolDefinitionError
from pawl.values import ExecutionContext

MEMORY_BYTES_MIN: Final = 1024 * 1024
MEMORY_BYTES_MAX: Final = 2**40
CPU_SECONDS_MIN: Final = 1
CPU_SECONDS_MAX: Final = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits for the process that is started for each call. The tool's timeout also applies.

    Raises:
        ToolDefinitionError: A limit is out of range.
    """

    # Memory that a call may allocate, including the memory of libraries that its module imports. Linux only.
    memory_bytes: int = 512 * 1024 * 1024
    # Total CPU time of all threads, in whole seconds.
    cpu_seconds: int = 60

    def __post_init__(self) -> None:
        _require(self.memory_bytes, MEMORY_BYTES_MIN, MEMORY_BYTES_MAX, "memory_bytes")
        _require(self.cpu_seconds, CPU_SECONDS_MIN, CPU_SECONDS_MAX, "cpu_seconds")


def _require(value: Any, least: int, most: int, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ToolDefinitionError(f"ProcessLimits: {name} must be an integer between {least} and {most}, got {value!r}")


def check_process(name: str, function: Callable[..., Any], context: ExecutionContext, limits: object) -> None:
    """Check that a function can run in its own process with these limits.

    Raises:
        ToolDefinitionError: The limits are invalid, a new process could not find the function, or the function does not
            run in the registry.
    """
    if not isinstance(limits, ProcessLimits):
        raise ToolDefinitionError(f"{name}: process must be ProcessLimits(...)")
    if context is not ExecutionContext.BACKEND:
        raise ToolDefinitionError(f"{name}: only a BACKEND tool can run in its own process")
    if "<locals>" in getattr(function, "__qualname__", ""):
        raise ToolDefinitionError(
            f"{name}: a function that runs in its own process must be at the top level of its module, so that the"
            " process can find it"
        )
