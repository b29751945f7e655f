"""Decisions about calls, results of calls, and what became of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pawl.agent.v1 import types_pb2
from pawl.chassis import strict_json
from pawl.errors import InvalidField, PawlError, by_reason
from pawl.event.v1 import call_pb2

TAKEN: Final = frozenset({types_pb2.RECEIPT_STATUS_ACCEPTED, types_pb2.RECEIPT_STATUS_DUPLICATE})
"""The receipts of what is in effect."""


def approve(call: call_pb2.Call, note: str = "") -> types_pb2.CallDecision:
    """Return: run it as shown. The note is for the log."""
    return _decision(call, call_pb2.DECISION_KIND_APPROVE, reason=note)


def edit(call: call_pb2.Call, arguments: Mapping[str, Any] | bytes, note: str = "") -> types_pb2.CallDecision:
    """Return: run it with these arguments, all of them, or with those of a JSON text. The note is for the log."""
    content = arguments if isinstance(arguments, bytes) else strict_json.dumps_canonical(dict(arguments))
    return _decision(call, call_pb2.DECISION_KIND_EDIT, arguments_json=content, reason=note)


def reject(call: call_pb2.Call, reason: str = "") -> types_pb2.CallDecision:
    """Return: do not run it, or give no answer; the model is told the reason."""
    return _decision(call, call_pb2.DECISION_KIND_REJECT, reason=reason)


def answer(call: call_pb2.Call, text: str) -> types_pb2.CallDecision:
    """Return: this is the answer to the question, or the result to give instead of running the call."""
    return _decision(call, call_pb2.DECISION_KIND_ANSWER, answer=text)


def result(call: call_pb2.Call, value: Any, *, is_error: bool = False) -> types_pb2.ToolResult:
    """Return the result of a front-end call: a JSON value; an error is for the model."""
    content = strict_json.dumps_canonical(value)
    call = _read(call)
    return types_pb2.ToolResult(run_id=call.run_id, call_id=call.call_id, content_json=content, is_error=is_error)


def checked(decision: object) -> types_pb2.CallDecision:
    """Return a decision.

    Raises:
        InvalidField: it is none, but an id perhaps.
    """
    if isinstance(decision, types_pb2.CallDecision):
        return decision
    message = "a decision is approve(call), edit(call, arguments), reject(call) or answer(call, text)"
    raise InvalidField(message, field="decision")


def check_taken(receipt: types_pb2.Receipt) -> None:
    """Return if the receipt says that it is in effect.

    Raises:
        PawlError: it is not; of the class of the receipt's reason.
    """
    if receipt.status not in TAKEN:
        told = receipt.message or receipt.reason or types_pb2.ReceiptStatus.Name(receipt.status)
        raise by_reason.get(receipt.reason, PawlError).restore(told, receipt.reason, {})


def _decision(call: call_pb2.Call, kind: call_pb2.DecisionKind.ValueType, **fields: Any) -> types_pb2.CallDecision:
    call = _read(call)
    return types_pb2.CallDecision(
        run_id=call.run_id, call_id=call.call_id, kind=kind, digest=call.approval.digest, **fields
    )


def _read(call: object) -> call_pb2.Call:
    """Return a call as it was read: an id does not say what was decided about."""
    if isinstance(call, call_pb2.Call):
        return call
    raise InvalidField("give the call itself, as pending() or get() returned it", field="call")
