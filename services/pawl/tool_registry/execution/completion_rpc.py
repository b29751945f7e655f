"""Implements pawl.tool.v1.CompletionService, with which external systems complete calls.

The store comes from the caller's credential.
"""

from __future__ import annotations

from pawl.chassis.identity.auth import require_user
from pawl.chassis.rpc.kinds import Context
from pawl.errors import InvalidField
from pawl.tool.v1 import completion_pb2 as pb
from pawl.tool.v1 import completion_pb2_grpc
from pawl.tool_registry.execution.completions import Completing
from pawl.tool_registry.execution.rules import CallEnd


class CompletionServicer(completion_pb2_grpc.CompletionServiceServicer):
    def __init__(self, completing: Completing) -> None:
        self._completing = completing

    async def CompleteCall(self, request: pb.CompleteCallRequest, context: Context) -> pb.CompleteCallResponse:
        match request.WhichOneof("end"):
            case "result_json":
                end = CallEnd(content=request.result_json)
            case "error" if request.error:
                end = CallEnd(error=request.error)
            case _:
                raise InvalidField("end must be result_json, or a non-empty error", field="end")
        return pb.CompleteCallResponse(duplicate=await self._completing.complete(require_user(), request.token, end))
