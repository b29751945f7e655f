"""The frames of workers, checked, and from what a worker answers to what a tool returns or raises."""

from __future__ import annotations

from typing import Any, Final

from pawl.chassis.ids import check_id
from pawl.chassis.strict_json import dumps_canonical, loads
from pawl.errors import InvalidField, InvalidJson, PawlError, TooLarge
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import worker_pb2 as pb
from pawl.tool_registry.rules.definition import ARGUMENTS_BYTES_MAX, RESULT_BYTES_MAX, ToolVersion, can_exist
from pawl.tool_registry.rules.execution import CHECKPOINT_BYTES_MAX, InverseCall, inverse_call, progress
from pawl.tool_registry.sdk.context import OutcomeUnknown, ResultTooLarge, ToolError
from pawl.tool_registry.sdk.inverse import Inverse, Reversible
from pawl.tool_registry.sdk.reconciling import ReconcileResult, cannot_say, did_not_happen, happened
from pawl.tool_registry.sources.worker.rules import Answer, AnswerKind
from pawl.values import Outcome, Progress

_ERROR_CHARACTERS_MAX: Final = 4000
_EPOCH_MAX: Final = 2**63 - 1


def check_frame(frame: pb.AttachWorkerRequest) -> None:
    """Return if a frame has a meaning.

    Raises:
        InvalidField, InvalidId
    """
    kind = frame.WhichOneof("frame")
    if kind is None:
        raise InvalidField("the frame is empty, or of a kind that this version does not know", field="frame")
    if kind in {"progress", "checkpoint", "result"}:
        content = getattr(frame, kind)
        check_id(content.call_id, f"{kind}.call_id")
        check_epoch(content.lease_epoch)
    if kind == "result" and frame.result.WhichOneof("outcome") is None:
        raise InvalidField("result.outcome: is required", field="result.outcome")


def check_epoch(epoch: int) -> int:
    """Return a lease epoch; InvalidField if it was never given."""
    if epoch > _EPOCH_MAX:
        raise InvalidField("lease_epoch: is none that was given", field="lease_epoch")
    return epoch


def progress_of(report: pb.WorkerProgress) -> Progress:
    """Return progress as the journal stores it."""
    return progress(report.fraction if report.HasField("fraction") else None, report.message)


def checkpoint_content(content: bytes) -> bytes:
    """Return the canonical JSON of a checkpoint; nothing for what is none: it is a fault of one tool of the worker."""
    try:
        return dumps_canonical(loads(content, bytes_max=CHECKPOINT_BYTES_MAX))
    except (InvalidJson, TooLarge):
        return b""


def answer_of(result: pb.WorkerResult) -> Answer:
    """Return the answer in a result."""
    match result.WhichOneof("outcome"):
        case "content_json":
            try:
                inverse = _inverse_call(result.inverse) if result.HasField("inverse") else None
            except (PawlError, ValueError) as error:
                return Answer(kind=AnswerKind.FAILED, message=f"the result cannot be passed on: {error}")
            return Answer(kind=AnswerKind.RETURNED, content=result.content_json, inverse=inverse)
        case "error_message":
            return Answer(kind=AnswerKind.FAILED, message=result.error_message[:_ERROR_CHARACTERS_MAX])
        case "did_not_happen":
            return Answer(kind=AnswerKind.DID_NOT_HAPPEN)
        case _:
            return Answer(kind=AnswerKind.OUTCOME_UNKNOWN)


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


def _inverse_call(inverse: call_pb2.Inverse) -> InverseCall:
    arguments = loads(inverse.arguments_json or b"{}", bytes_max=ARGUMENTS_BYTES_MAX)
    if not isinstance(arguments, dict) or not can_exist(inverse.tool_name):
        raise ValueError("an inverse needs the name of a tool, and a JSON object for its arguments")
    return inverse_call(inverse.tool_name, dumps_canonical(arguments), inverse.summary)
