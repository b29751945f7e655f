"""Frames of a worker: from the contract to ours and back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

from pawl.chassis.ids import CallId, WorkerId, check_id
from pawl.chassis.strict_json import dumps_canonical, loads
from pawl.errors import HelloRequired, InvalidField, InvalidJson, PawlError, TooLarge
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import worker_pb2
from pawl.tool_registry.app.workers import link as frames
from pawl.tool_registry.domain.definition import ARGUMENTS_BYTES_MAX, can_exist
from pawl.tool_registry.domain.execution import CHECKPOINT_BYTES_MAX, progress
from pawl.tool_registry.domain.inverse import InverseCall, inverse_call
from pawl.tool_registry.domain.workers import (
    CALLS_MAX,
    TOOLS_MAX,
    Answer,
    AnswerKind,
    Hello,
    Invocation,
)
from pawl.tool_registry.rpc import convert

_ERROR_CHARACTERS_MAX: Final = 4000
_EPOCH_MAX: Final = 2**63 - 1


async def hello_of(requests: AsyncIterator[worker_pb2.AttachWorkerRequest]) -> Hello:
    """Return the first frame.

    Raises:
        HelloRequired: it is none, or another one.
        InvalidField, InvalidId, InvalidSchema: something in it has no meaning.
    """
    request = await anext(requests, None)
    if request is None or request.WhichOneof("frame") != "hello":
        raise HelloRequired
    hello = request.hello
    if len(hello.tools) > TOOLS_MAX:
        raise InvalidField(f"hello.tools: at most {TOOLS_MAX}", field="hello.tools")
    if hello.calls_max > CALLS_MAX:
        raise InvalidField(f"hello.calls_max: at most {CALLS_MAX}", field="hello.calls_max")
    if len(hello.held_calls) > CALLS_MAX:
        raise InvalidField(f"hello.held_calls: at most {CALLS_MAX}", field="hello.held_calls")
    return Hello(
        group_name=check_id(hello.group_name, "hello.group_name"),
        worker_id=WorkerId(check_id(hello.worker_id, "hello.worker_id")),
        definitions=tuple(map(convert.DEFINITION.read, hello.tools)),
        calls_max=hello.calls_max or 1,
        held={CallId(check_id(call.call_id, "hello.held_calls.call_id")): _epoch(call) for call in hello.held_calls},
    )


async def worker_frames(
    requests: AsyncIterator[worker_pb2.AttachWorkerRequest],
) -> AsyncGenerator[frames.WorkerFrame, None]:
    """Give the frames after the first.

    Raises:
        InvalidField, InvalidId: something in one has no meaning.
        HelloRequired: a second hello came.
    """
    async for request in requests:
        yield _worker_frame(request)


def _worker_frame(request: worker_pb2.AttachWorkerRequest) -> frames.WorkerFrame:
    match request.WhichOneof("frame"):
        case "heartbeat":
            return frames.Heartbeat()
        case "drain":
            return frames.Drain()
        case "progress":
            report = request.progress
            return frames.ProgressReport(
                call_id=CallId(check_id(report.call_id, "progress.call_id")),
                lease_epoch=_epoch(report),
                progress=progress(report.fraction if report.HasField("fraction") else None, report.message),
            )
        case "checkpoint":
            checkpoint = request.checkpoint
            return frames.CheckpointReport(
                call_id=CallId(check_id(checkpoint.call_id, "checkpoint.call_id")),
                lease_epoch=_epoch(checkpoint),
                number=checkpoint.number,
                content=_checkpoint_content(checkpoint.content_json),
            )
        case "result":
            return frames.Result(
                call_id=CallId(check_id(request.result.call_id, "result.call_id")),
                lease_epoch=_epoch(request.result),
                answer=_answer(request.result),
            )
        case "hello":
            raise HelloRequired
        case _:
            raise InvalidField("the frame is empty, or of a kind that this version does not know", field="frame")


def _epoch(message: Any) -> int:
    epoch: int = message.lease_epoch
    if epoch > _EPOCH_MAX:
        raise InvalidField("lease_epoch: is none that was given", field="lease_epoch")
    return epoch


def _checkpoint_content(content: bytes) -> bytes:
    """Return the canonical JSON of a checkpoint; nothing for what is none: it is a fault of one tool of the worker."""
    try:
        return dumps_canonical(loads(content, bytes_max=CHECKPOINT_BYTES_MAX))
    except (InvalidJson, TooLarge):
        return b""


def _answer(result: worker_pb2.WorkerResult) -> Answer:
    match result.WhichOneof("outcome"):
        case "content_json":
            try:
                inverse = _inverse(result.inverse) if result.HasField("inverse") else None
            except (PawlError, ValueError) as error:
                return Answer(kind=AnswerKind.FAILED, message=f"the result cannot be passed on: {error}")
            return Answer(kind=AnswerKind.RETURNED, content=result.content_json, inverse=inverse)
        case "error_message":
            return Answer(kind=AnswerKind.FAILED, message=result.error_message[:_ERROR_CHARACTERS_MAX])
        case "outcome_unknown":
            return Answer(kind=AnswerKind.OUTCOME_UNKNOWN)
        case "did_not_happen":
            return Answer(kind=AnswerKind.DID_NOT_HAPPEN)
        case _:
            raise InvalidField("result.outcome: is required", field="result.outcome")


def _inverse(inverse: call_pb2.Inverse) -> InverseCall:
    arguments = loads(inverse.arguments_json or b"{}", bytes_max=ARGUMENTS_BYTES_MAX)
    if not isinstance(arguments, dict) or not can_exist(inverse.tool_name):
        raise ValueError("an inverse needs the name of a tool, and a JSON object for its arguments")
    return inverse_call(inverse.tool_name, dumps_canonical(arguments), inverse.summary)


registry_frame: Final = convert.WIRE.one_of(
    worker_pb2.AttachWorkerResponse,
    "frame",
    {
        "welcome": frames.Welcome,
        "invocation": Invocation,
        "cancel": frames.InvocationCancel,
        "receipt": frames.ResultReceipt,
        "checkpoint": frames.CheckpointReceipt,
        "heartbeat": frames.HeartbeatAnswer,
    },
).write
"""Return a frame as the contract words it."""
