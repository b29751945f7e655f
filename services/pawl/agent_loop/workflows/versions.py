"""Reads workflow versions from job-store."""

from __future__ import annotations

import grpc

from pawl.chassis.ids import StoreId
from pawl.chassis.rpc.client import translated
from pawl.event.v1 import workflow_pb2
from pawl.job.v1 import workflows_pb2, workflows_pb2_grpc


class WorkflowLedger:
    """Client for job-store's workflow API. May raise DependencyUnavailable and can be retried."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = workflows_pb2_grpc.WorkflowLedgerServiceStub(channel)

    async def get(self, store_id: StoreId, name: str, version: int) -> workflow_pb2.WorkflowVersion:
        """Return a version. Version 0 means the newest version of a workflow that is not deleted.

        Raises:
            WorkflowNotFound
        """
        request = workflows_pb2.GetWorkflowRequest(store_id=store_id, name=name, version=version)
        return (await translated(self._stub.GetWorkflow(request))).workflow
