"""Creates decisions on calls, creates results of front-end calls, and checks the receipts for both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pawl.agent.v1 import types_pb2
from pawl.chassis import strict_json
from pawl.errors import InvalidField, PawlError, by_reason
from pawl.event.v1 import call_pb2

# Receipt statuses of requests that have taken effect.
TAKEN: Final = frozenset({types_pb2.RECEIPT_STATUS_ACCEPTED, types_pb2.RECEIPT_STATUS_DUPLICATE})


def approve(call: call_pb2.Call, note: str = "", *, for_series: bool = False) -> types_pb2.CallDecision:
    """Return a decision to run the call as shown. The note is written to the log.

    With `for_series`, the decision applies to the whole series, `call.approval.series`.

    Raises:
        InvalidField: `for_series` is set and the call does not belong to a series.
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
    """Return a decision to run the call with these arguments (a mapping or JSON text). The note is written to the log.

    With `for_series`, the decision applies to the whole series. `series` replaces the interval, limit and end of the
    call's series. If `series` has no end, the end of the call's series does not change.

    Raises:
        InvalidField: The decision is for a series and the call does not belong to one.
    """
    content = arguments if isinstance(arguments, bytes) else strict_json.dumps_canonical(dict(arguments))
    fields = {"arguments_json": content, "reason": note, "edited_series": series}
    return _decision(call, call_pb2.DECISION_KIND_EDIT, for_series=for_series or series is not None, **fields)


def reject(call: call_pb2.Call, reason: str = "") -> types_pb2.CallDecision:
    """Return a decision not to run the call, or not to answer the question. The model receives the reason."""
    return _decision(call, call_pb2.DECISION_KIND_REJECT, reason=reason)


def answer(call: call_pb2.Call, text: str) -> types_pb2.CallDecision:
    """Return a decision that answers a question.

    For any other call, `text` becomes the result and the call does not run.
    """
    return _decision(call, call_pb2.DECISION_KIND_ANSWER, answer=text)


def result(call: call_pb2.Call, value: Any, *, is_error: bool = False) -> types_pb2.ToolResult:
    """Return the result of a front-end call: a JSON value, or an error for the model."""
    content = strict_json.dumps_canonical(value)
    call = _read(call)
    return types_pb2.ToolResult(run_id=call.run_id, call_id=call.call_id, content_json=content, is_error=is_error)


def checked(decision: object) -> types_pb2.CallDecision:
    """Return `decision` if it is a `CallDecision`.

    Raises:
        InvalidField: It is something else, such as an id.
    """
    if isinstance(decision, types_pb2.CallDecision):
        return decision
    message = "a decision must be approve(call), edit(call, arguments), reject(call) or answer(call, text)"
    raise InvalidField(message, field="decision")


def check_taken(receipt: types_pb2.Receipt) -> None:
    """Check that a request took effect, according to its receipt.

    Raises:
        PawlError: The request did not take effect. The receipt's reason determines the class.
    """
    if receipt.status not in TAKEN:
        message = receipt.message or receipt.reason or types_pb2.ReceiptStatus.Name(receipt.status)
        raise by_reason.get(receipt.reason, PawlError).restore(message, receipt.reason, {})


def _decision(
    call: call_pb2.Call, kind: call_pb2.DecisionKind.ValueType, *, for_series: bool = False, **fields: Any
) -> types_pb2.CallDecision:
    call = _read(call)
    if for_series and not call.approval.HasField("series"):
        raise InvalidField("the call has no series: decide on this call only", field="for_series")
    digest = call.approval.series.digest if for_series else call.approval.digest
    return types_pb2.CallDecision(
        run_id=call.run_id, call_id=call.call_id, kind=kind, digest=digest, for_series=for_series, **fields
    )


def _read(call: object) -> call_pb2.Call:
    """Return `call` if it is a `Call`. An id would not identify the version that the user decided on."""
    if isinstance(call, call_pb2.Call):
        return call
    raise InvalidField("pass the call itself, as returned by pending() or get()", field="call")
