"""Servicers for pawl.agent.v1.WorkflowService (forwarded by agent-loop) and pawl.job.v1.WorkflowLedgerService."""

from __future__ import annotations

from functools import partial
from typing import Final

from pawl.agent.v1 import workflow_pb2 as pb
from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import check_id
from pawl.chassis.rpc.kinds import Context
from pawl.errors import InvalidWorkflow, WorkflowNotFound
from pawl.event.v1 import workflow_pb2
from pawl.job.v1 import workflows_pb2 as ledger
from pawl.job.v1 import workflows_pb2_grpc
from pawl.job_store.ledger.pages import Id, next_token, page_size, read_token
from pawl.job_store.versions.rpc import VERSION_MAX, message_of, versions_for
from pawl.job_store.versions.rules import Kind, VersionRow, saved
from pawl.job_store.versions.store import PostgresVersions

WORKFLOW: Final = Kind("workflow", "nodes", WorkflowNotFound, InvalidWorkflow)


class WorkflowServicer:
    def __init__(self, workflows: PostgresVersions) -> None:
        self._workflows = workflows

    async def ListWorkflows(self, request: pb.ListWorkflowsRequest, context: Context) -> pb.ListWorkflowsResponse:
        user = require_user()
        after = read_token(request.page_token, "ListWorkflows", (user.store_id,), Id) or ""
        page = await self._workflows.list(user.store_id, after=after, rows_max=page_size(request.page_size))
        token = next_token("ListWorkflows", (user.store_id,), page, lambda row: row.name)
        return pb.ListWorkflowsResponse(workflows=map(_listed, page.rows), next_page_token=token)

    async def ListWorkflowVersions(
        self, request: pb.ListWorkflowVersionsRequest, context: Context
    ) -> pb.ListWorkflowVersionsResponse:
        user = require_user()
        shown, token = await versions_for(
            user,
            self._workflows,
            request,
            method="ListWorkflowVersions",
            read=_listed,
            not_found=WorkflowNotFound,
        )
        return pb.ListWorkflowVersionsResponse(workflows=shown, next_page_token=token)


class WorkflowLedgerServicer(workflows_pb2_grpc.WorkflowLedgerServiceServicer):
    def __init__(self, workflows: PostgresVersions) -> None:
        self._workflows = workflows

    async def PutWorkflow(self, request: ledger.PutWorkflowRequest, context: Context) -> ledger.PutWorkflowResponse:
        requested = partial(
            VersionRow,
            store_id=check_id(request.store_id, "store_id"),
            name=check_id(request.workflow.name, "workflow.name"),
            content=request.workflow.SerializeToString(deterministic=True),
            create_user_id=check_id(request.user_id, "user_id"),
            create_credential_id=check_id(request.credential_id, "credential_id", optional=True),
        )
        uses = tuple(sorted(set(request.uses)))
        stored, created = await self._workflows.put(
            check_id(request.store_id, "store_id"),
            request.workflow.name,
            uses,
            lambda known, newest, now: saved(WORKFLOW, requested(create_time=now), uses, known, newest),
            validate_only=request.validate_only,
        )
        return ledger.PutWorkflowResponse(workflow=message_of(stored, workflow_pb2.WorkflowVersion), created=created)

    async def GetWorkflow(self, request: ledger.GetWorkflowRequest, context: Context) -> ledger.GetWorkflowResponse:
        store_id, name = check_id(request.store_id, "store_id"), check_id(request.name, "name")
        found = None
        if request.version <= VERSION_MAX:
            found = await self._workflows.get(store_id, name, request.version)
        if found is None:
            raise WorkflowNotFound
        return ledger.GetWorkflowResponse(workflow=message_of(found, workflow_pb2.WorkflowVersion))

    async def DeleteWorkflow(
        self, request: ledger.DeleteWorkflowRequest, context: Context
    ) -> ledger.DeleteWorkflowResponse:
        deleted = await self._workflows.delete(
            check_id(request.store_id, "store_id"),
            check_id(request.name, "name"),
            check_id(request.user_id, "user_id"),
            check_id(request.credential_id, "credential_id", optional=True),
        )
        if not deleted:
            raise WorkflowNotFound
        return ledger.DeleteWorkflowResponse()


def _listed(row: VersionRow) -> workflow_pb2.WorkflowVersion:
    workflow = message_of(row, workflow_pb2.WorkflowVersion)
    workflow.ClearField("definition_json")
    return workflow
