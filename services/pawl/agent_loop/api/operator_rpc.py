"""pawl.agent.v1.OperatorService: requests to use cases, what they return to responses."""

from __future__ import annotations

from pawl.agent.v1 import operator_pb2 as pb
from pawl.agent.v1 import operator_pb2_grpc
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.operators import Operators
from pawl.chassis.identity.auth import Principal, require_user
from pawl.chassis.ids import RequestId, RunId, check_id
from pawl.chassis.rpc.kinds import Context
from pawl.event.v1 import run_pb2


class OperatorServicer(operator_pb2_grpc.OperatorServiceServicer):
    """Serves those who look after a store. Store and role come from their credential alone."""

    def __init__(self, ledger: PublicLedger, operators: Operators) -> None:
        self._ledger = ledger
        self._operators = operators

    async def ListAttention(self, request: pb.ListAttentionRequest, context: Context) -> pb.ListAttentionResponse:
        run_id = check_id(request.run_id, "run_id", optional=True)
        page = await self._ledger.list_attention(require_user(), run_id, convert.page(request))
        return pb.ListAttentionResponse(runs=map(_run_in_need, page.runs), next_page_token=page.next_page_token)

    async def RedriveRun(self, request: pb.RedriveRunRequest, context: Context) -> pb.RedriveRunResponse:
        run = await self._operators.redrive(*_act(request))
        return pb.RedriveRunResponse(state=run.state)

    async def EndRun(self, request: pb.EndRunRequest, context: Context) -> pb.EndRunResponse:
        run = await self._operators.end(*_act(request))
        return pb.EndRunResponse(state=run.state)

    async def EndJobs(self, request: pb.EndJobsRequest, context: Context) -> pb.EndJobsResponse:
        job_ids = await self._operators.end_jobs(require_user(), convert.request_id(request), request.reason)
        return pb.EndJobsResponse(job_ids=job_ids)


def _act(request: pb.RedriveRunRequest | pb.EndRunRequest) -> tuple[Principal, RequestId, RunId, str]:
    """Return who acts, with which command, on which run, and why."""
    request_id = convert.request_id(request)
    return require_user(), request_id, convert.run_id(request), request.reason


def _run_in_need(run: run_pb2.Run) -> pb.RunInNeed:
    return pb.RunInNeed(
        run_id=run.run_id,
        user_id=run.user_id,
        conversation_id=run.conversation_id,
        attention=run.attention,
        crash_count=run.crash_count,
        round=run.round,
        stop_cause=run.stop_cause,
        calls=run.pending_calls,
    )
