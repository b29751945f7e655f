"""Settles calls. Each call gets exactly one result."""

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
    "It is unknown whether this call took effect: the process that ran it ended unexpectedly. Check before you "
    "repeat it."
)
_DEFAULT_ANSWER: Final = "No answer arrived in time. This is the question's default answer."

# Result reason of a call that may still be running although its run was stopped.
NOT_STOPPED: Final = "NOT_STOPPED"


def error(reason: str, message: str) -> CallResult:
    content = strict_json.dumps_canonical({"error": message})
    return CallResult(content_json=content, is_error=True, error_reason=reason)


def settled(call: Call, state: CallState, result: CallResult, now: float, note: str = "") -> Call:
    notes = [note, _edit_note(call), result.note]
    whole = replace(result, note=" ".join(part for part in notes if part))
    return replace(call, state=state, result=whole, end_time=now, deadline_time=None)


def executed(call: Call, ended: ExecutionResult, now: float, note: str = "") -> Call:
    result = ended.result
    if ended.outcome is Outcome.UNKNOWN:
        result = error("OUTCOME_UNKNOWN", _UNKNOWN)
    elif result.error_reason == NOT_STOPPED:
        return _not_stopped(call, result, now, note)
    return settled(call, _STATE_OF_OUTCOME[ended.outcome], result, now, note)


def stopped(call: Call, answer: Stopped, now: float, note: str = "") -> Call:
    """Settle a running call after the registry was asked to cancel it.

    If the call may still be running, its result has the reason NOT_STOPPED. A repeatable call becomes CANCELLED. Any
    other call becomes OUTCOME_UNKNOWN.
    """
    if answer.result is not None:
        return executed(call, answer.result, now, note)
    if answer.stopped:
        return withdrawn(call, "The run was stopped before this call ended.", now)
    message = "The run was stopped. It is unknown whether this call was stopped; it may still be running."
    return _not_stopped(call, error(NOT_STOPPED, message), now, note)


def _not_stopped(call: Call, result: CallResult, now: float, note: str) -> Call:
    state = CallState.CANCELLED if call.effect_class in REPEATABLE else CallState.OUTCOME_UNKNOWN
    return settled(call, state, result, now, note)


def withdrawn(call: Call, message: str, now: float) -> Call:
    return settled(call, CallState.CANCELLED, error("CANCELLED", message), now)


def expired(call: Call, options: RunOptions, now: float) -> Call:
    """Handle a call that users or clients did not decide on, answer or run in time.

    The call becomes EXPIRED, with three exceptions. An approval request that can be escalated gets a second deadline. A
    question with a default answer gets that answer. A front-end call can become a question with a new deadline.
    Front-end calls that fall back to a backend tool are handled elsewhere.
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
            return settled(call, CallState.SUCCEEDED, CallResult(content_json=content), now, _DEFAULT_ANSWER)
        case CallState.AWAITING_APPROVAL:
            message = "The run was stopped. It is unknown whether this call was stopped; it may still be running."
        case CallState.ASKED:
            message = "No answer arrived in time."
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
