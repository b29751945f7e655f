"""The answer of a tool when asked whether a call had its effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pawl.tool_registry.sdk.context import ToolError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileResult:
    """The knowledge about an earlier execution; made by the functions below."""

    finding: Literal["HAPPENED", "FAILED", "DID_NOT_HAPPEN", "CANNOT_SAY"]
    result: Any = None


def happened(result: Any) -> ReconcileResult:
    """It had its effect; `result` is what the call returns."""
    return ReconcileResult(finding="HAPPENED", result=result)


def failed(error: ToolError) -> ReconcileResult:
    """It has ended, with an error for the model."""
    return ReconcileResult(finding="FAILED", result=error)


def did_not_happen() -> ReconcileResult:
    """It had no effect and can have none any more: the tool is run."""
    return ReconcileResult(finding="DID_NOT_HAPPEN")


def cannot_say() -> ReconcileResult:
    """Nobody knows: the outcome is UNKNOWN."""
    return ReconcileResult(finding="CANNOT_SAY")
