"""Implements pawl.agent.v1.WorkflowService. job-store implements ListWorkflows and ListWorkflowVersions."""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from pawl.agent.v1 import workflow_pb2 as pb
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.inbox import Inbox, derived_id
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.replies import run_after
from pawl.agent_loop.workflows import definition as definitions
from pawl.agent_loop.workflows import mermaid
from pawl.agent_loop.workflows.executions import Executions
from pawl.agent_loop.workflows.reading import Graphs
from pawl.agent_loop.workflows.schema import SCHEMA_JSON
from pawl.agent_loop.workflows.starting import WorkflowStarting
from pawl.agent_loop.workflows.versions import WorkflowLedger, Workflows
from pawl.chassis.identity.auth import Principal, require_decider, require_user
from pawl.chassis.ids import RequestId, RunId, check_id
from pawl.chassis.labels import RESERVED
from pawl.chassis.rpc.kinds import Context
from pawl.errors import InvalidField, RequestIdReused, RunNotFound, WorkflowNotFound
from pawl.event.v1 import run_pb2
from pawl.job.v1.ledger_pb2 import EventCommand

_VERSION_MAX: Final = 2**31 - 1


class WorkflowServicer:
    def __init__(self, ledger: PublicLedger, inbox: Inbox, workflows: Workflows, starting: WorkflowStarting) -> None:
        self._inbox = inbox
        self._workflows = workflows
        self._starting = starting
        self._executions = Executions(ledger, Graphs(WorkflowLedger(ledger.channel)))

    async def SaveWorkflow(self, request: pb.SaveWorkflowRequest, context: Context) -> pb.SaveWorkflowResponse:
        saved = await self._workflows.save(
            require_decider(), request.definition_json, validate_only=request.validate_only
        )
        response = pb.SaveWorkflowResponse(**saved)
        if request.validate_only and response.HasField("workflow"):
            response.mermaid = mermaid.flowchart(definitions.decode(response.workflow.definition_json))
        return response

    async def GetWorkflow(self, request: pb.GetWorkflowRequest, context: Context) -> pb.GetWorkflowResponse:
        name = check_id(request.name, "name")
        if request.version > _VERSION_MAX:
            raise WorkflowNotFound
        found = await self._workflows.get(require_user(), name, request.version)
        chart = mermaid.flowchart(definitions.decode(found.definition_json))
        return pb.GetWorkflowResponse(workflow=found, mermaid=chart)

    async def GetWorkflowSchema(
        self, request: pb.GetWorkflowSchemaRequest, context: Context
    ) -> pb.GetWorkflowSchemaResponse:
        return pb.GetWorkflowSchemaResponse(schema_json=SCHEMA_JSON)

    async def DeleteWorkflow(self, request: pb.DeleteWorkflowRequest, context: Context) -> pb.DeleteWorkflowResponse:
        await self._workflows.delete(require_decider(), check_id(request.name, "name"))
        return pb.DeleteWorkflowResponse()

    async def StartWorkflow(self, request: pb.StartWorkflowRequest, context: Context) -> pb.StartWorkflowResponse:
        return pb.StartWorkflowResponse(run=await self._starting.start(require_user(), request))

    async def GetExecution(self, request: pb.GetExecutionRequest, context: Context) -> pb.GetExecutionResponse:
        return await self._executions.get(require_user(), convert.run_id(request), request.node)

    async def RerunFrom(self, request: pb.RerunFromRequest, context: Context) -> pb.RerunFromResponse:
        caller, run_id = require_user(), convert.run_id(request)
        found, rerun = await self._executions.rerun(caller, run_id, request.node)
        steps = found.graph.steps
        response = pb.RerunFromResponse(
            reused_nodes=[step.path for step in steps if step.number in rerun.start.nodes],
            rerun_nodes=[step.path for step in steps if step.number not in rerun.start.nodes],
        )
        if request.validate_only:
            response.repeated_effects.extend(await self._executions.effects(caller, found, rerun.again))
            return response
        workflow = found.run.workflow
        requested = pb.StartWorkflowRequest(
            request_id=convert.request_id(request),
            name=workflow.name,
            version=workflow.version,
            input_json=workflow.input_json,
            reports_to_conversation_id=workflow.reports_to_conversation_id,
            labels={key: value for key, value in found.run.labels.items() if not key.startswith(RESERVED)},
            total_tokens_max=found.run.options.limits.total_tokens_max,
        )
        state = msgspec.json.encode(rerun.start)
        reused = {"rerun_of_run_id": run_id, "rerun_node": request.node, "start_state": state}
        response.run.CopyFrom(await self._starting.start(caller, requested, reused))
        return response

    async def PauseExecution(self, request: pb.PauseExecutionRequest, context: Context) -> pb.PauseExecutionResponse:
        return pb.PauseExecutionResponse(run=await self._pause(request, resumes=False))

    async def ResumeExecution(self, request: pb.ResumeExecutionRequest, context: Context) -> pb.ResumeExecutionResponse:
        return pb.ResumeExecutionResponse(run=await self._pause(request, resumes=True))

    async def SendEvent(self, request: pb.SendEventRequest, context: Context) -> pb.SendEventResponse:
        if request.token:
            if request.run_id or request.name or request.event_id:
                raise InvalidField("token cannot be combined with run_id, name or event_id", field="token")
            caller, run_id, name = await self._executions.of_token(require_user(), request.token)
            try:
                await self._send(caller, derived_id("token", name), run_id, name, request.payload_json)
            except RequestIdReused:
                raise RequestIdReused("the token was already used with a different result") from None
            return pb.SendEventResponse()
        event_id = RequestId(check_id(request.event_id, "event_id", optional=True))
        caller, run_id = require_user(), convert.run_id(request)
        await self._executions.check_event(caller, run_id, request.name)
        run = await self._send(caller, event_id, run_id, request.name, request.payload_json)
        return pb.SendEventResponse(run=run)

    async def _send(
        self, caller: Principal, event_id: RequestId, run_id: RunId, name: str, payload_json: bytes
    ) -> run_pb2.Run:
        event = EventCommand(name=name, payload_json=payload_json)
        is_awaited = partial(self._executions.awaits, caller, run_id, name)
        return run_after(await self._inbox.send_event(caller, event_id, run_id, event, is_awaited), RunNotFound)

    async def _pause(
        self, request: pb.PauseExecutionRequest | pb.ResumeExecutionRequest, *, resumes: bool
    ) -> run_pb2.Run:
        request_id, caller, run_id = convert.request_id(request), require_user(), convert.run_id(request)
        await self._executions.named(caller, run_id)
        return run_after(await self._inbox.pause(caller, request_id, run_id, resumes=resumes), RunNotFound)
