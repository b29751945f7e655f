"""Results that a `reconcile` function can report about an earlier execution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pawl.tools.sdk.context import ToolError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileResult:
    """The result of checking whether an earlier execution took effect. Create it with the functions below."""

    finding: Literal["HAPPENED", "FAILED", "DID_NOT_HAPPEN", "CANNOT_SAY"]
    result: Any = None


def happened(result: Any) -> ReconcileResult:
    """Report that the execution took effect. `result` becomes the call's result."""
    return ReconcileResult(finding="HAPPENED", result=result)


def failed(error: ToolError) -> ReconcileResult:
    """Report that the execution ended with an error, which the model sees."""
    return ReconcileResult(finding="FAILED", result=error)


def did_not_happen() -> ReconcileResult:
    """Report that the execution did not take effect and cannot do so later. The tool runs again."""
    return ReconcileResult(finding="DID_NOT_HAPPEN")


def cannot_say() -> ReconcileResult:
    """Report that it is unknown whether the execution took effect. The call's outcome is UNKNOWN."""
    return ReconcileResult(finding="CANNOT_SAY")
