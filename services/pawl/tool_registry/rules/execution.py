"""The call that takes the effect of another one back, as it is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec

from pawl.chassis.strict_json import dumps_canonical, storable
from pawl.tool_registry.rules.definition import ARGUMENTS_BYTES_MAX
from pawl.values import Outcome, Progress, Question

SUMMARY_CHARACTERS_MAX: Final = 300


class InverseCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool, with canonical arguments; `summary` says in one line what it does."""

    tool_name: str
    arguments: bytes
    summary: str


def inverse_call(tool_name: str, arguments: bytes, summary: str) -> InverseCall:
    """Return an inverse within its limits.

    Raises:
        ValueError: its arguments are more than any call can have.
    """
    if len(arguments) > ARGUMENTS_BYTES_MAX:
        raise ValueError(f"an inverse may have arguments of {ARGUMENTS_BYTES_MAX} bytes")
    return InverseCall(tool_name=tool_name, arguments=arguments, summary=summary[:SUMMARY_CHARACTERS_MAX])


PROGRESS_BYTES_MAX: Final = 1024
CHECKPOINT_BYTES_MAX: Final = 16 * 1024

NOT_STOPPED: Final = "NOT_STOPPED"
"""Reason of the result of a cancelled execution whose tool goes on."""


OPEN: Final = frozenset({Outcome.INPUT_REQUIRED, Outcome.AWAITING_COMPLETION})
"""The outcomes of executions that have not ended."""
ENDS: Final = frozenset({Outcome.SUCCEEDED, Outcome.FAILED})
"""The outcomes of a tool that came to its own end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionResult:
    """The end of an execution. `content` is strict JSON."""

    outcome: Outcome
    content: bytes
    is_error: bool = False
    error_reason: str = ""
    note: str = ""
    duration_seconds: float = 0.0
    inverse: InverseCall | None = None
    """The call that takes its effect back, if the tool gave one."""
    question: Question | None = None
    """The question, with INPUT_REQUIRED."""
    completion_seconds_left: float = 0.0
    """The time in which somebody may complete it, with AWAITING_COMPLETION; none if it is over."""


def succeeded(content: bytes, seconds: float, inverse: InverseCall | None = None) -> ExecutionResult:
    """Return the result of a tool that returned."""
    return ExecutionResult(outcome=Outcome.SUCCEEDED, content=content, duration_seconds=seconds, inverse=inverse)


def ended_badly(outcome: Outcome, reason: str, message: str, seconds: float = 0.0) -> ExecutionResult:
    """Return an error result: the model reads `{"error": message}`."""
    return ExecutionResult(
        outcome=outcome,
        content=dumps_canonical({"error": storable(message)}),
        is_error=True,
        error_reason=reason,
        duration_seconds=seconds,
    )


def input_required(question: Question, seconds: float) -> ExecutionResult:
    """Return what there is instead of a result while a tool asks a person something."""
    return ExecutionResult(outcome=Outcome.INPUT_REQUIRED, content=b"null", duration_seconds=seconds, question=question)


def awaiting_completion(seconds_left: float = 0.0) -> ExecutionResult:
    """Return what there is instead of a result until somebody outside completes the call."""
    return ExecutionResult(
        outcome=Outcome.AWAITING_COMPLETION, content=b"null", completion_seconds_left=max(0.0, seconds_left)
    )


def progress(fraction: float | None, message: str) -> Progress:
    """Return progress cut to what is allowed."""
    if fraction is not None:
        fraction = min(1.0, max(0.0, fraction)) if math.isfinite(fraction) else None
    text = storable(message).encode()[:PROGRESS_BYTES_MAX].decode(errors="ignore")
    return Progress(fraction=fraction, message=text)
