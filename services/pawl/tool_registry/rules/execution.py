"""The results of executions, and the inverse calls that undo effects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec

from pawl.chassis.strict_json import dumps_canonical, storable
from pawl.tools.rules.definition import ARGUMENTS_BYTES_MAX
from pawl.values import Outcome, Progress, Question

SUMMARY_CHARACTERS_MAX: Final = 300


class InverseCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that undoes another call, with canonical arguments. `summary` describes it in one line."""

    tool_name: str
    arguments: bytes
    summary: str


def inverse_call(tool_name: str, arguments: bytes, summary: str) -> InverseCall:
    """Build an inverse call.

    Raises:
        ValueError: The arguments exceed the limit that applies to every call.
    """
    if len(arguments) > ARGUMENTS_BYTES_MAX:
        raise ValueError(f"an inverse's arguments are {len(arguments)} bytes, over the limit of {ARGUMENTS_BYTES_MAX}")
    return InverseCall(tool_name=tool_name, arguments=arguments, summary=summary[:SUMMARY_CHARACTERS_MAX])


PROGRESS_BYTES_MAX: Final = 1024

# Error reason of a cancelled execution whose tool is still running.
NOT_STOPPED: Final = "NOT_STOPPED"


# Outcomes of executions that have not ended.
OPEN: Final = frozenset({Outcome.INPUT_REQUIRED, Outcome.AWAITING_COMPLETION})
# Outcomes of tools that finished on their own.
ENDS: Final = frozenset({Outcome.SUCCEEDED, Outcome.FAILED})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionResult:
    """The result of an execution. `content` is strict JSON."""

    outcome: Outcome
    content: bytes
    is_error: bool = False
    error_reason: str = ""
    note: str = ""
    duration_seconds: float = 0.0
    # The call that undoes the effect, if the tool returned one.
    inverse: InverseCall | None = None
    # Set for INPUT_REQUIRED.
    question: Question | None = None
    # For AWAITING_COMPLETION: the time left to complete the call; 0 after its deadline.
    completion_seconds_left: float = 0.0


def succeeded(content: bytes, seconds: float, inverse: InverseCall | None = None) -> ExecutionResult:
    return ExecutionResult(outcome=Outcome.SUCCEEDED, content=content, duration_seconds=seconds, inverse=inverse)


def ended_badly(outcome: Outcome, reason: str, message: str, seconds: float = 0.0) -> ExecutionResult:
    """Return an error result. The model sees `{"error": message}`."""
    return ExecutionResult(
        outcome=outcome,
        content=dumps_canonical({"error": storable(message)}),
        is_error=True,
        error_reason=reason,
        duration_seconds=seconds,
    )


def input_required(question: Question, seconds: float) -> ExecutionResult:
    return ExecutionResult(outcome=Outcome.INPUT_REQUIRED, content=b"null", duration_seconds=seconds, question=question)


def awaiting_completion(seconds_left: float = 0.0) -> ExecutionResult:
    return ExecutionResult(
        outcome=Outcome.AWAITING_COMPLETION, content=b"null", completion_seconds_left=max(0.0, seconds_left)
    )


def progress(fraction: float | None, message: str) -> Progress:
    """Return a progress report, with the fraction limited to the range from 0 to 1 and the message truncated.

    A fraction that is not finite becomes None.
    """
    if fraction is not None:
        fraction = min(1.0, max(0.0, fraction)) if math.isfinite(fraction) else None
    text = storable(message).encode()[:PROGRESS_BYTES_MAX].decode(errors="ignore")
    return Progress(fraction=fraction, message=text)
