"""Turns a tool's return value or exception into the result that the model reads."""

from __future__ import annotations

import traceback
from collections.abc import Collection
from enum import StrEnum
from typing import Any, Final

from pawl.chassis.process import logs
from pawl.chassis.strict_json import dumps_canonical
from pawl.errors import InvalidJson
from pawl.tool_registry.rules.execution import (
    NOT_STOPPED,
    ExecutionResult,
    InverseCall,
    ended_badly,
    inverse_call,
    succeeded,
)
from pawl.tools.rules.definition import RESULT_BYTES_MAX, ToolDefinition
from pawl.tools.sdk.context import OutcomeUnknown, ResultTooLarge, ToolError
from pawl.tools.sdk.inverse import Inverse, Reversible
from pawl.tools.sdk.values import hide, plain, without
from pawl.values import EffectClass, Outcome

_ERROR_CHARACTERS_MAX: Final = 4000

# The error reason of a call that was not completed in time.
NOT_COMPLETED: Final = "NOT_COMPLETED"

_log = logs.get_logger(__name__)


class ToolEnd(StrEnum):
    """The state of the tool when its call timed out or was cancelled."""

    NEVER_STARTED = "NEVER_STARTED"
    STOPPED = "STOPPED"
    # The tool runs elsewhere, and it is unknown whether it will stop.
    ASKED_TO_STOP = "ASKED_TO_STOP"
    STILL_RUNNING = "STILL_RUNNING"


def of_value(definition: ToolDefinition, value: Any, *, secrets: Collection[str], seconds: float) -> ExecutionResult:
    """Return the result for a tool that returned `value`."""
    inverse, given = (value.inverse, value.value) if isinstance(value, Reversible) else (None, value)
    try:
        content = dumps_canonical(without(secrets, plain(given)))
        back = None if inverse is None else _inverse(inverse, secrets)
    except (TypeError, ValueError, RecursionError, InvalidJson) as error:
        reason = error.message if isinstance(error, InvalidJson) else f"{type(given).__name__} is not JSON"
        return ended_badly(Outcome.FAILED, "TOOL_ERROR", unusable_text(definition, reason), seconds)
    if len(content) > (definition.result_bytes_max or RESULT_BYTES_MAX):
        return ended_badly(Outcome.FAILED, "RESULT_TOO_LARGE", too_large_text(definition, len(content)), seconds)
    return succeeded(content, seconds, back)


def unusable_text(definition: ToolDefinition, reason: str) -> str:
    return f"{definition.name} returned a value that cannot be passed on: {reason}"


def too_large_text(definition: ToolDefinition, count: int) -> str:
    limit = definition.result_bytes_max or RESULT_BYTES_MAX
    return f"{definition.name} returned {count} bytes, over the limit of {limit}: request less data"


def unexpected_text(definition: ToolDefinition, error: str) -> str:
    """Return the error text for an unexpected exception of the type `error`, without the exception's own text."""
    return f"TOOL_ERROR: {error}. {definition.name} failed unexpectedly; the operator can find the cause in the log."


def doubt(definition: ToolDefinition) -> str:
    """Return the part of an interrupted tool's error text that states whether the tool may have taken effect."""
    return "; it may still have taken effect" if definition.effect.is_journaled else ""


def _inverse(inverse: Inverse, secrets: Collection[str]) -> InverseCall:
    arguments = dumps_canonical(without(secrets, plain(inverse.arguments)))
    return inverse_call(inverse.tool_name, arguments, hide(secrets, inverse.summary))


def of_error(
    definition: ToolDefinition, error: BaseException, *, secrets: Collection[str], seconds: float
) -> ExecutionResult:
    """Return the result for a tool that raised an exception.

    Only a ToolError's text reaches the model. The text of other exceptions can contain paths, queries and passwords.
    The model therefore sees only their type, and only the type and the stack frames are logged.
    """
    if isinstance(error, OutcomeUnknown):
        return of_doubt(definition.name, seconds)
    if isinstance(error, ToolError):
        text = hide(secrets, str(error) or type(error).__name__)[:_ERROR_CHARACTERS_MAX]
        reason = "RESULT_TOO_LARGE" if isinstance(error, ResultTooLarge) else "TOOL_ERROR"
        return ended_badly(Outcome.FAILED, reason, text, seconds)
    name = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    _log.warning(
        "tool.failed",
        tool=definition.name,
        error=name,
        frames=[f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
    )
    return ended_badly(Outcome.FAILED, "TOOL_ERROR", unexpected_text(definition, name), seconds)


def of_timeout(
    definition: ToolDefinition, limit_seconds: float, seconds: float, end: ToolEnd, *, hindrance: str = ""
) -> ExecutionResult:
    """Return the result for a tool that timed out.

    `hindrance` is a sentence about another tool that may have blocked it.
    """
    match end:
        case ToolEnd.STOPPED | ToolEnd.NEVER_STARTED:
            then = f"and was stopped{doubt(definition)}"
        case ToolEnd.ASKED_TO_STOP:
            then = f"and was asked to stop; it may keep running{_late_effect(definition)}"
        case ToolEnd.STILL_RUNNING:
            then = f"and was asked to stop, but keeps running{_late_effect(definition)}"
    message = f"{definition.name} did not end within {limit_seconds:g} s {then}{hindrance and f'. {hindrance}'}"
    return ended_badly(Outcome.FAILED, "TOOL_TIMEOUT", message, seconds)


def of_uncompleted(definition: ToolDefinition, seconds: float = 0.0) -> ExecutionResult:
    """Return the result for a call that was not completed in time."""
    message = f"{definition.name} returned, but the call was not completed in time{doubt(definition)}"
    return ended_badly(Outcome.FAILED, NOT_COMPLETED, message, seconds)


def of_unstarted(definition: ToolDefinition, reason: str, why: str, seconds: float) -> ExecutionResult:
    """Return the result for a call that ended before its tool was started."""
    message = f"{definition.name} was not started, because {why}: it was never sent and had no effect. Call it again"
    return ended_badly(Outcome.FAILED, reason, message, seconds)


def of_cancel(definition: ToolDefinition, seconds: float, end: ToolEnd = ToolEnd.STOPPED) -> ExecutionResult:
    if end is ToolEnd.STILL_RUNNING:
        message = (
            f"{definition.name} was asked to stop, but keeps running{_late_effect(definition)}. "
            "A sync tool stops early only if it calls context.check_cancelled()"
        )
        return ended_badly(Outcome.CANCELLED, NOT_STOPPED, message, seconds)
    then = " before it started" if end is ToolEnd.NEVER_STARTED else doubt(definition)
    return ended_badly(Outcome.CANCELLED, "CANCELLED", f"{definition.name} was cancelled{then}", seconds)


def _late_effect(definition: ToolDefinition) -> str:
    return "" if definition.effect is EffectClass.READ_ONLY else " and may still take effect"


def of_doubt(name: str, seconds: float = 0.0) -> ExecutionResult:
    """Return the result for a call whose outcome is unknown."""
    return ended_badly(
        Outcome.UNKNOWN,
        "OUTCOME_UNKNOWN",
        f"{name} was interrupted: it is unknown whether it took effect. Do not simply repeat it.",
        seconds,
    )
