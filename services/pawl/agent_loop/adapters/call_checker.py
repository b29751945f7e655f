"""The registry service, for arguments that a reviewer edited, and for answers."""

from __future__ import annotations

from contextlib import suppress

import grpc

from pawl.agent_loop.app.public_values import CallView, RunView, Verdict
from pawl.chassis.rpc_client import translated
from pawl.errors import Internal, InvalidArguments, MethodNotFound
from pawl.tool.v1 import execution_pb2, execution_pb2_grpc


class RegistryCallChecker:
    """A `CallChecker` over a channel to tool-registry."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = execution_pb2_grpc.ExecutionServiceStub(channel)

    async def check_answer(self, store_id: str, answer_schema_json: bytes, answer: str) -> None:
        request = execution_pb2.CheckAnswerRequest(
            store_id=store_id, answer_schema_json=answer_schema_json, answer=answer
        )
        # A registry of the version before this one checks it as it goes back into the call.
        with suppress(MethodNotFound):
            await translated(self._stub.CheckAnswer(request))

    async def check_edit(self, store_id: str, run: RunView, call: CallView, arguments_json: bytes) -> Verdict:
        request = execution_pb2.CheckCallsRequest(
            context=execution_pb2.CallContext(
                store_id=store_id,
                # Who edits it decides for the user of the run: that user must be allowed to make the call.
                user_id=run.user_id,
                conversation_id=run.conversation_id,
                run_id=run.run_id,
                user_roles=sorted(run.user_roles),
                approvals_required=run.approvals_required,
            ),
            calls=[
                execution_pb2.ProposedCall(
                    call_id=call.call_id,
                    tool_name=call.tool_name,
                    tool_version=call.tool_version,
                    arguments_json=arguments_json,
                    edited=True,
                )
            ],
            known_tool_names=[call.tool_name],
        )
        response = await translated(self._stub.CheckCalls(request))
        if len(response.verdicts) != 1:
            raise Internal("the registry answered one call with another number of verdicts")
        verdict = response.verdicts[0]
        if verdict.disposition in {execution_pb2.DISPOSITION_REFUSE, execution_pb2.DISPOSITION_UNSPECIFIED}:
            raise InvalidArguments(verdict.error_message)
        return Verdict(arguments_json=verdict.arguments_json, digest=verdict.digest, preview=verdict.preview)
