"""The answer of a tool when asked whether a call had its effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileResult:
    """The knowledge about an earlier execution; made by the three functions below."""

    finding: Literal["HAPPENED", "DID_NOT_HAPPEN", "CANNOT_SAY"]
    result: Any = None


def happened(result: Any) -> ReconcileResult:
    """It had its effect; `result` is what the call returns."""
    return ReconcileResult(finding="HAPPENED", result=result)


def did_not_happen() -> ReconcileResult:
    """It had no effect and can have none any more: the tool is run."""
    return ReconcileResult(finding="DID_NOT_HAPPEN")


def cannot_say() -> ReconcileResult:
    """Nobody knows: the outcome is UNKNOWN."""
    return ReconcileResult(finding="CANNOT_SAY")
