"""From what a worker answers to what a tool returns or raises."""

from __future__ import annotations

from typing import Any

from pawl.chassis.strict_json import dumps_canonical, loads
from pawl.errors import InvalidJson, TooLarge
from pawl.tool_registry.domain.definition import ARGUMENTS_BYTES_MAX, RESULT_BYTES_MAX, ToolVersion
from pawl.tool_registry.domain.inverse import InverseCall
from pawl.tool_registry.domain.workers import Answer, AnswerKind
from pawl.tool_registry.sdk.context import OutcomeUnknown, ResultTooLarge, ToolError
from pawl.tool_registry.sdk.inverse import Inverse, Reversible
from pawl.tool_registry.sdk.reconciling import ReconcileResult, cannot_say, did_not_happen, happened
from pawl.values.tool import Outcome


def value_of(entry: ToolVersion, answer: Answer) -> Any:
    """Return what a call returned.

    Raises:
        ToolError: it failed, or what it returned cannot be passed on.
        OutcomeUnknown: the worker does not know.
    """
    match answer.kind:
        case AnswerKind.RETURNED:
            value = _parsed(entry, answer)
            return value if answer.inverse is None else Reversible(value=value, inverse=_inverse(answer.inverse))
        case AnswerKind.FAILED:
            raise ResultTooLarge(answer.message) if answer.is_too_large else ToolError(answer.message)
        case AnswerKind.OUTCOME_UNKNOWN | AnswerKind.DID_NOT_HAPPEN:
            raise OutcomeUnknown


def finding_of(entry: ToolVersion, answer: Answer) -> ReconcileResult:
    """Return what a worker found out about an earlier execution."""
    match answer.kind:
        case AnswerKind.RETURNED:
            return happened(_parsed(entry, answer))
        case AnswerKind.DID_NOT_HAPPEN:
            return did_not_happen()
        case AnswerKind.FAILED | AnswerKind.OUTCOME_UNKNOWN:
            return cannot_say()


def late_end(answer: Answer) -> tuple[Outcome, bytes]:
    """Return what a tool came to whose call had ended before, and the canonical JSON of what it returned."""
    match answer.kind:
        case AnswerKind.RETURNED:
            try:
                return Outcome.SUCCEEDED, dumps_canonical(loads(answer.content, bytes_max=RESULT_BYTES_MAX))
            except (InvalidJson, TooLarge):
                return Outcome.FAILED, b""
        case AnswerKind.FAILED:
            return Outcome.FAILED, b""
        case AnswerKind.OUTCOME_UNKNOWN | AnswerKind.DID_NOT_HAPPEN:
            return Outcome.UNKNOWN, b""


def bounded(answer: Answer) -> Answer:
    """Return an answer of a size that is kept."""
    if len(answer.content) <= RESULT_BYTES_MAX:
        return answer
    message = f"the result has more than {RESULT_BYTES_MAX} bytes, which is the limit: ask for less"
    return Answer(kind=AnswerKind.FAILED, message=message, is_too_large=True)


def _parsed(entry: ToolVersion, answer: Answer) -> Any:
    try:
        return loads(answer.content, bytes_max=RESULT_BYTES_MAX)
    except (InvalidJson, TooLarge) as error:
        raise ToolError(f"{entry.definition.name} returned what cannot be passed on: {error.message}") from None


def _inverse(inverse: InverseCall) -> Inverse:
    arguments: Any = loads(inverse.arguments, bytes_max=ARGUMENTS_BYTES_MAX)
    return Inverse(tool_name=inverse.tool_name, arguments=arguments, summary=inverse.summary)
