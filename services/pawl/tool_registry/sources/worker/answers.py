"""Checks frames from workers, and converts their answers to tool results and errors."""

from __future__ import annotations

from typing import Any, Final

from pawl.chassis.ids import check_id
from pawl.chassis.strict_json import dumps_canonical, loads
from pawl.errors import InvalidField, InvalidJson, PawlError, TooLarge
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import worker_pb2 as pb
from pawl.tool_registry.rules.execution import progress
from pawl.tool_registry.sources.worker.rules import CALLS_MAX, TOOLS_MAX
from pawl.tools.rules.definition import (
    ARGUMENTS_BYTES_MAX,
    CHECKPOINT_BYTES_MAX,
    RESULT_BYTES_MAX,
    ToolVersion,
    can_exist,
)
from pawl.tools.sdk.context import OutcomeUnknown, ResultTooLarge, ToolError
from pawl.tools.sdk.inverse import Inverse, Reversible
from pawl.tools.sdk.reconciling import ReconcileResult, cannot_say, did_not_happen, happened
from pawl.values import Outcome, Progress

_ERROR_CHARACTERS_MAX: Final = 4000
_EPOCH_MAX: Final = 2**63 - 1


def check_hello(hello: pb.WorkerHello) -> None:
    """Check a worker's first frame, except for the tools in it.

    Raises:
        InvalidField, InvalidId: A field is invalid.
    """
    for field, count, most in (
        ("tools", len(hello.tools), TOOLS_MAX),
        ("calls_max", hello.calls_max, CALLS_MAX),
        ("held_calls", len(hello.held_calls), CALLS_MAX),
    ):
        if count > most:
            raise InvalidField(f"hello.{field} must not exceed {most}, got {count}", field=f"hello.{field}")
    check_id(hello.group_name, "hello.group_name")
    check_id(hello.worker_id, "hello.worker_id")
    for call in hello.held_calls:
        check_id(call.call_id, "hello.held_calls.call_id")
        _check_epoch(call.lease_epoch)


def check_frame(frame: pb.AttachWorkerRequest) -> None:
    """Check a worker's frame.

    Raises:
        InvalidField, InvalidId: A field is invalid.
    """
    kind = frame.WhichOneof("frame")
    if kind is None:
        raise InvalidField("the frame is empty or of an unknown kind", field="frame")
    if kind in {"progress", "checkpoint", "result"}:
        content = getattr(frame, kind)
        check_id(content.call_id, f"{kind}.call_id")
        _check_epoch(content.lease_epoch)
    if kind == "result" and frame.result.WhichOneof("outcome") is None:
        raise InvalidField("result.outcome is required", field="result.outcome")


def _check_epoch(epoch: int) -> None:
    if epoch > _EPOCH_MAX:
        raise InvalidField(f"lease_epoch must be at most {_EPOCH_MAX}, got {epoch}", field="lease_epoch")


def progress_of(report: pb.WorkerProgress) -> Progress:
    return progress(report.fraction if report.HasField("fraction") else None, report.message)


def checkpoint_content(content: bytes) -> bytes:
    """Return a checkpoint as canonical JSON, or "" if it is invalid. An invalid checkpoint must not end the stream."""
    try:
        return dumps_canonical(loads(content, bytes_max=CHECKPOINT_BYTES_MAX))
    except (InvalidJson, TooLarge):
        return b""


def bound(result: pb.WorkerResult) -> None:
    """Truncate a result to the size at which it can be stored.

    Content over the limit is cut to one byte more than the limit, so that it can still be recognized as too large.
    """
    if result.HasField("error_message"):
        result.error_message = result.error_message[:_ERROR_CHARACTERS_MAX]
    if not result.HasField("content_json"):
        result.ClearField("inverse")
        return
    result.content_json = result.content_json[: RESULT_BYTES_MAX + 1]
    try:
        if result.HasField("inverse"):
            _inverse(result.inverse)
    except (PawlError, ValueError) as error:
        result.ClearField("inverse")
        result.error_message = f"the result is invalid: {error}"


def value_of(entry: ToolVersion, result: pb.WorkerResult) -> Any:
    """Return a call's value.

    Raises:
        ToolError: The call failed, or its value cannot be passed on.
        OutcomeUnknown: The worker does not know the outcome.
    """
    match result.WhichOneof("outcome"):
        case "content_json":
            value = _parsed(entry, result)
            return Reversible(value=value, inverse=_inverse(result.inverse)) if result.HasField("inverse") else value
        case "error_message":
            raise ToolError(result.error_message)
        case _:
            raise OutcomeUnknown


def finding_of(entry: ToolVersion, result: pb.WorkerResult) -> ReconcileResult:
    """Return a worker's finding about an earlier execution. Raise ToolError if the finding cannot be passed on."""
    match result.WhichOneof("outcome"):
        case "content_json":
            return happened(_parsed(entry, result))
        case "did_not_happen":
            return did_not_happen()
        case _:
            return cannot_say()


def late_end(result: pb.WorkerResult) -> tuple[Outcome, bytes]:
    """Return the outcome and the canonical JSON value of a result that arrived after its call had ended.

    The value is empty unless the call succeeded.
    """
    match result.WhichOneof("outcome"):
        case "content_json":
            try:
                return Outcome.SUCCEEDED, dumps_canonical(loads(result.content_json, bytes_max=RESULT_BYTES_MAX))
            except (InvalidJson, TooLarge):
                return Outcome.FAILED, b""
        case "error_message":
            return Outcome.FAILED, b""
        case _:
            return Outcome.UNKNOWN, b""


def _parsed(entry: ToolVersion, result: pb.WorkerResult) -> Any:
    if len(result.content_json) > RESULT_BYTES_MAX:
        raise ResultTooLarge(f"the result is larger than the limit of {RESULT_BYTES_MAX} bytes: request less data")
    try:
        return loads(result.content_json, bytes_max=RESULT_BYTES_MAX)
    except InvalidJson as error:
        raise ToolError(f"{entry.definition.name} returned an invalid result: {error.message}") from None


def _inverse(inverse: call_pb2.Inverse) -> Inverse:
    arguments: Any = loads(inverse.arguments_json or b"{}", bytes_max=ARGUMENTS_BYTES_MAX)
    if not isinstance(arguments, dict) or not can_exist(inverse.tool_name):
        raise ValueError("inverse must have a tool name, and a JSON object as arguments")
    return Inverse(tool_name=inverse.tool_name, arguments=arguments, summary=inverse.summary)
