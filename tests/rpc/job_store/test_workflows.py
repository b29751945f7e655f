"""Versions of workflows over gRPC, with a real database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pawl.chassis.identity.auth import user_principal
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.rpc.status import from_rpc_error
from pawl.event.v1 import agent_pb2, workflow_pb2
from pawl.job.v1 import agents_pb2
from pawl.job.v1 import workflows_pb2 as pb
from pawl.job.v1.agents_pb2_grpc import AgentLedgerServiceStub
from pawl.job.v1.workflows_pb2_grpc import WorkflowLedgerServiceStub
from tests.rpc.job_store.conftest import Replica
from tests.rpc.job_store.user import forwarded

if TYPE_CHECKING:
    from pawl.job.v1.workflows_pb2_grpc import WorkflowLedgerServiceAsyncStub


@pytest.fixture
def workflows(replica: Replica) -> WorkflowLedgerServiceAsyncStub:
    return WorkflowLedgerServiceStub(replica.channel)


def put(name: str = "triage", definition: bytes = b"{}", *uses: str, **fields: Any) -> pb.PutWorkflowRequest:
    validate_only = fields.pop("validate_only", False)
    workflow = workflow_pb2.WorkflowVersion(name=name, definition_json=definition, **fields)
    return pb.PutWorkflowRequest(
        store_id="acme", user_id="ann", credential_id="key_1", workflow=workflow, uses=uses, validate_only=validate_only
    )


def named(name: str = "triage", version: int = 0, store: str = "acme") -> pb.GetWorkflowRequest:
    return pb.GetWorkflowRequest(store_id=store, name=name, version=version)


DELETE = pb.DeleteWorkflowRequest(store_id="acme", user_id="ann", credential_id="key_1", name="triage")


def listed(replica: Replica, method: str, **fields: Any) -> Any:
    user = user_principal(StoreId("acme"), UserId("bob"), frozenset())
    return forwarded(replica.channel, user, method, **fields)


async def reason(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value).reason


async def test_versions_are_kept_and_never_changed(replica: Replica, workflows: WorkflowLedgerServiceAsyncStub) -> None:
    assert (await workflows.PutWorkflow(put(validate_only=True))).created
    assert await reason(workflows.GetWorkflow(named())) == "WORKFLOW_NOT_FOUND", "a check stores nothing"
    first = await workflows.PutWorkflow(put(description="Sort it."))
    assert (first.created, first.workflow.version, first.workflow.create_user_id) == (True, 1, "ann")
    same = await workflows.PutWorkflow(put(description="Sort it."))
    assert (same.created, same.workflow) == (False, first.workflow)
    assert (await workflows.PutWorkflow(put(definition=b'{"a":1}'))).workflow.version == 2
    assert (await workflows.GetWorkflow(named(version=1))).workflow == first.workflow
    for missing in (named(version=3), named(version=2**32 - 1), named("other"), named(store="elsewhere")):
        assert await reason(workflows.GetWorkflow(missing)) == "WORKFLOW_NOT_FOUND"
    await workflows.DeleteWorkflow(DELETE)
    assert await reason(workflows.DeleteWorkflow(DELETE)) == "WORKFLOW_NOT_FOUND"
    assert await reason(workflows.GetWorkflow(named())) == "WORKFLOW_NOT_FOUND"
    assert (await workflows.GetWorkflow(named(version=2))).workflow.version == 2
    assert (await workflows.PutWorkflow(put())).workflow.version == 3, "a new one continues the version numbers"
    assert (await workflows.GetWorkflow(named())).workflow.version == 3


async def test_workflows_and_agents_with_the_same_name_are_independent(
    replica: Replica, workflows: WorkflowLedgerServiceAsyncStub
) -> None:
    await workflows.PutWorkflow(put("clerk"))
    agents = AgentLedgerServiceStub(replica.channel)
    asked = agents_pb2.GetAgentRequest(store_id="acme", name="clerk")
    assert await reason(agents.GetAgent(asked)) == "AGENT_NOT_FOUND"
    assert not (await agents.ListAgents(agents_pb2.ListAgentsRequest(store_id="acme"))).agents
    clerk = agent_pb2.AgentDefinition(name="clerk")
    put_agent = agents_pb2.PutAgentRequest(store_id="acme", user_id="ann", definition=clerk)
    assert (await agents.PutAgent(put_agent)).agent.version == 1
    await workflows.DeleteWorkflow(pb.DeleteWorkflowRequest(store_id="acme", user_id="ann", name="clerk"))
    assert (await agents.GetAgent(asked)).agent.version == 1


async def test_workflows_are_listed_by_name_without_definitions(
    replica: Replica, workflows: WorkflowLedgerServiceAsyncStub
) -> None:
    for name in ("c", "a", "b"):
        await workflows.PutWorkflow(put(name))
    first = await listed(replica, "ListWorkflows", page_size=2)
    rest = await listed(replica, "ListWorkflows", page_token=first.next_page_token)
    found = [(each.name, each.definition_json) for each in (*first.workflows, *rest.workflows)]
    assert found == [("a", b""), ("b", b""), ("c", b"")]


async def test_workflows_cannot_start_each_other_in_a_cycle(workflows: WorkflowLedgerServiceAsyncStub) -> None:
    await workflows.PutWorkflow(put("a"))
    await workflows.PutWorkflow(put("b", b"{}", "a"))
    assert await reason(workflows.PutWorkflow(put("a", b"{}", "b"))) == "INVALID_WORKFLOW"
    assert await reason(workflows.PutWorkflow(put("c", b"{}", "gone"))) == "WORKFLOW_NOT_FOUND"
