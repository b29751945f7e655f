"""Defines what a `reconcile` function can report: whether an earlier execution took effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pawl.tool_registry.sdk.context import ToolError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileResult:
    """A finding about an earlier execution. Created by the functions below."""

    finding: Literal["HAPPENED", "FAILED", "DID_NOT_HAPPEN", "CANNOT_SAY"]
    result: Any = None


def happened(result: Any) -> ReconcileResult:
    """It took effect; `result` becomes the call's result."""
    return ReconcileResult(finding="HAPPENED", result=result)


def failed(error: ToolError) -> ReconcileResult:
    """It ended with an error that the model sees."""
    return ReconcileResult(finding="FAILED", result=error)


def did_not_happen() -> ReconcileResult:
    """It did not take effect and no longer can; the tool runs again."""
    return ReconcileResult(finding="DID_NOT_HAPPEN")


def cannot_say() -> ReconcileResult:
    """Whether it took effect is not known; the call's outcome is UNKNOWN."""
    return ReconcileResult(finding="CANNOT_SAY")
