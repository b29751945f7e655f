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


def approve(call: call_pb2.Call, note: str = "", *, for_series: bool = False) -> types_pb2.CallDecision:
    """Return: run it as shown, or with `for_series` the whole series (`call.approval.series`). The note is for the log.

    Raises:
        InvalidField: no series can be granted with it.
    """
    return _decision(call, call_pb2.DECISION_KIND_APPROVE, for_series=for_series, reason=note)


def edit(
    call: call_pb2.Call,
    arguments: Mapping[str, Any] | bytes,
    note: str = "",
    *,
    for_series: bool = False,
    series: call_pb2.Series | None = None,
) -> types_pb2.CallDecision:
    """Return: run it with these arguments, all of them, or with those of a JSON text. The note is for the log.

    With `for_series` it is for the whole series; a `series` says how often, how far apart and until when that is, and
    without an end keeps the one that is shown.

    Raises:
        InvalidField: no series can be granted with it.
    """
    content = arguments if isinstance(arguments, bytes) else strict_json.dumps_canonical(dict(arguments))
    fields = {"arguments_json": content, "reason": note, "edited_series": series}
    return _decision(call, call_pb2.DECISION_KIND_EDIT, for_series=for_series or series is not None, **fields)


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


def _decision(
    call: call_pb2.Call, kind: call_pb2.DecisionKind.ValueType, *, for_series: bool = False, **fields: Any
) -> types_pb2.CallDecision:
    call = _read(call)
    if for_series and not call.approval.HasField("series"):
        raise InvalidField("no series can be granted with this call: decide about the call alone", field="for_series")
    digest = call.approval.series.digest if for_series else call.approval.digest
    return types_pb2.CallDecision(
        run_id=call.run_id, call_id=call.call_id, kind=kind, digest=digest, for_series=for_series, **fields
    )


def _read(call: object) -> call_pb2.Call:
    """Return a call as it was read: an id does not say what was decided about."""
    if isinstance(call, call_pb2.Call):
        return call
    raise InvalidField("give the call itself, as pending() or get() returned it", field="call")
