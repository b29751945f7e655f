"""Serves pawl.agent.v1.OperatorService: operators' actions on a store's runs. ListRuns is forwarded to job-store."""

from __future__ import annotations

import asyncio
from typing import Final

from pawl.agent.v1 import operator_pb2
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.replies import Reply, is_taken, run_after
from pawl.agent_loop.loop.rules import checks
from pawl.chassis.identity.auth import Principal, require_user
from pawl.chassis.ids import IdSource, RequestId, RunId
from pawl.chassis.process import logs
from pawl.chassis.rpc.kinds import Context
from pawl.errors import AttentionNotNeeded, RunNotFound
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.values import CommandOutcome, RunState

# States of a run that was cancelled.
STOPPED: Final[frozenset[int]] = frozenset({RunState.CANCELLING, RunState.CANCELLED})

_log = logs.get_logger(__name__)


async def send(ledger: PublicLedger, caller: Principal, run_id: RunId, command: pb.Command, *, act: str) -> Reply:
    """Send an operator's command and log the operator. The ledger records accepted commands in the run's log."""
    reply = await ledger.send_command(caller, run_id, command, as_operator=True)
    outcome = CommandOutcome(reply.outcome).name
    _log.info("operator.acted", act=act, store=caller.store_id, user=caller.user_id, run=run_id, outcome=outcome)
    return reply


class OperatorServicer:
    """Implements OperatorService. The credential determines store and role."""

    def __init__(self, ledger: PublicLedger, ids: IdSource) -> None:
        self._ledger = ledger
        self._ids = ids

    async def RedriveRun(
        self, request: operator_pb2.RedriveRunRequest, context: Context
    ) -> operator_pb2.RedriveRunResponse:
        run_id, command = convert.run_id(request), pb.Command(redrive=pb.RedriveCommand(reason=_reason(request.reason)))
        command.command_id = convert.request_id(request) or self._ids.new("cmd")
        reply = await send(self._ledger, require_user(), run_id, command, act="redriven")
        run = run_after(reply, AttentionNotNeeded if reply.HasField("run") else RunNotFound)
        return operator_pb2.RedriveRunResponse(state=run.state)

    async def EndRun(self, request: operator_pb2.EndRunRequest, context: Context) -> operator_pb2.EndRunResponse:
        request_id, run_id = convert.request_id(request), convert.run_id(request)
        reply = await self._end(request_id or self._ids.new("cmd"), run_id, request.reason)
        return operator_pb2.EndRunResponse(state=run_after(reply, RunNotFound, also_late=True).state)

    async def EndJobs(self, request: operator_pb2.EndJobsRequest, context: Context) -> operator_pb2.EndJobsResponse:
        command_id = convert.request_id(request) or RequestId(self._ids.new("req"))
        _reason(request.reason)
        wanted = pb.ListJobsRequest(running_jobs_of_store=True, stopped_by_command_id=command_id)
        stopped = operator_pb2.EndJobsResponse()
        while True:
            found = await self._ledger.list_jobs(require_user(), wanted)
            replies = await asyncio.gather(
                *(self._end(command_id, RunId(job.run_id), request.reason) for job in found.runs)
            )
            # A command is refused if its job has ended or was removed in the meantime.
            ended = (reply.run for reply in replies if is_taken(reply) and reply.HasField("run"))
            stopped.job_ids.extend(job.run_id for job in ended if job.state in STOPPED)
            wanted.page_token = found.next_page_token
            if not wanted.page_token:
                return stopped

    async def _end(self, command_id: str, run_id: RunId, reason: str) -> Reply:
        cancel = pb.CancelCommand(cause=run_pb2.STOP_CAUSE_OPERATOR, reason=_reason(reason))
        command = pb.Command(command_id=command_id, cancel=cancel)
        return await send(self._ledger, require_user(), run_id, command, act="ended")


def _reason(reason: str) -> str:
    return checks.text(reason, "reason", bytes_max=checks.REASON_BYTES_MAX, may_be_empty=True)
