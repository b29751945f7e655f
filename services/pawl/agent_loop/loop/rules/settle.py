"""Settlement: a call gets its one result."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.run import ApprovalExpiryPolicy, RunOptions
from pawl.agent_loop.loop.rules.tool import ExecutionResult, Stopped
from pawl.chassis import strict_json
from pawl.values import REPEATABLE, CallState, OfferFallback, Outcome, Question

_NOTE_ARGUMENTS_MAX: Final = 2000

_STATE_OF_OUTCOME: Final = {
    Outcome.SUCCEEDED: CallState.SUCCEEDED,
    Outcome.FAILED: CallState.FAILED,
    Outcome.CANCELLED: CallState.CANCELLED,
    Outcome.UNKNOWN: CallState.OUTCOME_UNKNOWN,
}
_UNKNOWN: Final = (
    "It is not known whether this call had its effect: the process that ran it died. Check before you repeat it."
)
_NOBODY_ANSWERED: Final = "Nobody answered in time: this is the default answer that the question came with."

NOT_STOPPED: Final = "NOT_STOPPED"
"""Reason of the result of a call that may go on though its run was stopped."""


def error(reason: str, message: str) -> CallResult:
    """Return an error for the model."""
    content = strict_json.dumps_canonical({"error": message})
    return CallResult(content_json=content, is_error=True, error_reason=reason)


def settled(call: Call, state: CallState, result: CallResult, now: float, note: str = "") -> Call:
    """Return the call with its result and with everything that the model should know about how it came."""
    notes = [note, _edit_note(call), result.note]
    whole = replace(result, note=" ".join(part for part in notes if part))
    return replace(call, state=state, result=whole, end_time=now, deadline_time=None)


def executed(call: Call, ended: ExecutionResult, now: float, note: str = "") -> Call:
    """Return the call as its execution left it."""
    result = ended.result
    if ended.outcome is Outcome.UNKNOWN:
        result = error("OUTCOME_UNKNOWN", _UNKNOWN)
    elif result.error_reason == NOT_STOPPED:
        return _not_stopped(call, result, now, note)
    return settled(call, _STATE_OF_OUTCOME[ended.outcome], result, now, note)


def stopped(call: Call, answer: Stopped, now: float, note: str = "") -> Call:
    """Return a running call as the cancellation of its execution left it.

    What may go on has a result with the reason NOT_STOPPED; if it may then have
    an effect that nobody knows of, it is OUTCOME_UNKNOWN.
    """
    if answer.result is not None:
        return executed(call, answer.result, now, note)
    if answer.stopped:
        return withdrawn(call, "The run was stopped before this call ended.", now)
    message = "The run was stopped, and it could not be found out in time whether this call was: it may go on."
    return _not_stopped(call, error(NOT_STOPPED, message), now, note)


def _not_stopped(call: Call, result: CallResult, now: float, note: str) -> Call:
    state = CallState.CANCELLED if call.effect_class in REPEATABLE else CallState.OUTCOME_UNKNOWN
    return settled(call, state, result, now, note)


def withdrawn(call: Call, message: str, now: float) -> Call:
    """Return the call CANCELLED."""
    return settled(call, CallState.CANCELLED, error("CANCELLED", message), now)


def expired(call: Call, options: RunOptions, now: float) -> Call:
    """Return the call after nobody decided, answered or ran it in time.

    A request for approval that is to be escalated waits once more. A question with
    a default has that for its answer. A front-end call that shall be put to the
    user becomes a question with its own deadline; one that shall run in the
    backend instead is not for this function.
    """
    match call.state:
        case CallState.AWAITING_APPROVAL if _escalates(call, options):
            return replace(
                call,
                approval=replace(call.approval, escalated=True) if call.approval else None,
                deadline_time=now + options.limits.approval_expiry_seconds,
            )
        case CallState.ASKED if call.question is not None and call.question.default_answer:
            content = strict_json.dumps_canonical({"answer": call.question.default_answer})
            return settled(call, CallState.SUCCEEDED, CallResult(content_json=content), now, _NOBODY_ANSWERED)
        case CallState.AWAITING_APPROVAL:
            message = "Nobody approved this call in time, so it was not run."
        case CallState.ASKED:
            message = "Nobody answered in time."
        case _ if call.offer_fallback is OfferFallback.ASK_USER:
            asked = f"What is the result of {call.tool_name} with {_short(call.arguments_json)}?"
            return replace(
                call,
                state=CallState.ASKED,
                question=Question(question=asked, why="No client ran this call in time."),
                deadline_time=now + options.limits.answer_timeout_seconds,
            )
        case _:
            message = "No client ran this call in time."
    return settled(call, CallState.EXPIRED, error("EXPIRED", message), now)


def _escalates(call: Call, options: RunOptions) -> bool:
    escalated = call.approval is None or call.approval.escalated
    return options.approval_expiry_policy is ApprovalExpiryPolicy.ESCALATE and not escalated


def _edit_note(call: Call) -> str:
    if call.approval is None or not call.approval.edited:
        return ""
    return f"A reviewer edited this call. It was made with these arguments: {_short(call.arguments_json)}"


def _short(arguments_json: bytes) -> str:
    text = arguments_json.decode(errors="replace")
    return text if len(text) <= _NOTE_ARGUMENTS_MAX else text[:_NOTE_ARGUMENTS_MAX] + "..."
