"""Versions of agents and workflows, and declarations, over gRPC, with a real database."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest

from pawl.agent.v1.declaration_pb2 import Declaration
from pawl.chassis.identity.auth import Principal, user_principal
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.chassis.rpc.client import translated
from pawl.chassis.rpc.status import from_rpc_error
from pawl.errors import AgentNotFound, Conflict, InvalidField, PawlError, PermissionDenied, ScheduleNotFound, TooLarge
from pawl.event.v1 import agent_pb2, run_pb2, waiting_pb2, workflow_pb2
from pawl.event.v1.schedule_pb2 import ScheduleDefinition
from pawl.event.v1.trigger_pb2 import TriggerDefinition, WebhookSource
from pawl.job.v1 import agents_pb2, workflows_pb2
from pawl.job.v1.agents_pb2_grpc import AgentLedgerServiceStub
from pawl.job.v1.workflows_pb2_grpc import WorkflowLedgerServiceStub
from pawl.job_store.declarations import store
from tests.rpc.job_store.conftest import Replica, StartReplica
from tests.rpc.job_store.user import User, forwarded
from tests.rpc.refusals import raises, reason_of
from tests.rpc.stubs import AgentLedgerServiceAsyncStub, WorkflowLedgerServiceAsyncStub


@pytest.fixture
def agents(replica: Replica) -> AgentLedgerServiceAsyncStub:
    return AgentLedgerServiceStub(replica.channel)


def put(name: str = "clerk", *tools: str, store: str = "acme", **fields: Any) -> agents_pb2.PutAgentRequest:
    validate_only = fields.pop("validate_only", False)
    return agents_pb2.PutAgentRequest(
        store_id=store,
        user_id="ann",
        credential_id="key_1",
        definition=agent_pb2.AgentDefinition(name=name, **fields),
        tool_names=tools,
        validate_only=validate_only,
    )


def ask(replica: Replica, method: str, *, store: str = "acme", user: str = "ann", **fields: Any) -> Any:
    return forwarded(replica.channel, user_principal(StoreId(store), UserId(user), frozenset()), method, **fields)


async def test_versions_are_kept_and_never_changed(replica: Replica, agents: AgentLedgerServiceAsyncStub) -> None:
    options = run_pb2.RunOptions(instructions="Book it.", limits=run_pb2.RunLimits(rounds_max=3))
    # A workflow with the same name is independent.
    workflows = WorkflowLedgerServiceStub(replica.channel)
    await workflows.PutWorkflow(put_workflow("clerk"))
    await raises(AgentNotFound, agents.GetAgent(agents_pb2.GetAgentRequest(store_id="acme", name="clerk")))
    first = await agents.PutAgent(put("clerk", "mail", "look", options=options))
    await workflows.DeleteWorkflow(workflows_pb2.DeleteWorkflowRequest(store_id="acme", user_id="ann", name="clerk"))
    assert (first.created, first.agent.version, list(first.agent.tool_names)) == (True, 1, ["look", "mail"])
    same = await agents.PutAgent(put("clerk", "look", "mail", options=options))
    assert (same.created, same.agent) == (False, first.agent)
    more = await agents.PutAgent(put("clerk", "look", "mail", "pay", options=options))
    assert (more.created, more.agent.version) == (True, 2)
    assert (
        await agents.GetAgent(agents_pb2.GetAgentRequest(store_id="acme", name="clerk", version=1))
    ).agent == first.agent
    assert (await agents.GetAgent(agents_pb2.GetAgentRequest(store_id="acme", name="clerk"))).agent == more.agent
    listed = await ask(replica, "ListAgentVersions", name="clerk", page_size=1)
    assert [agent.version for agent in listed.agents] == [2]
    rest = await ask(replica, "ListAgentVersions", name="clerk", page_token=listed.next_page_token)
    assert [agent.version for agent in rest.agents] == [1]


async def test_versions_of_a_deleted_agent_are_kept(replica: Replica, agents: AgentLedgerServiceAsyncStub) -> None:
    first = (await agents.PutAgent(put())).agent
    await ask(replica, "DeleteAgent", name="clerk")
    assert await reason_of(ask(replica, "DeleteAgent", name="clerk")) == "AGENT_NOT_FOUND"
    assert (
        await reason_of(agents.GetAgent(agents_pb2.GetAgentRequest(store_id="acme", name="clerk"))) == "AGENT_NOT_FOUND"
    )
    default = await agents.GetAgent(agents_pb2.GetAgentRequest(store_id="acme", name="default"))
    assert not default.HasField("agent"), "a store without a budget is no error and not logged"
    assert not (await agents.ListAgents(agents_pb2.ListAgentsRequest(store_id="acme"))).agents
    assert (await agents.GetAgent(agents_pb2.GetAgentRequest(store_id="acme", name="clerk", version=1))).agent == first
    assert (await agents.PutAgent(put())).agent.version == 2, "a new agent of that name continues the version numbers"
    assert (await agents.GetAgent(agents_pb2.GetAgentRequest(store_id="acme", name="clerk"))).agent.version == 2


async def test_agents_are_listed_by_name_in_pages(replica: Replica, agents: AgentLedgerServiceAsyncStub) -> None:
    for name in ("c", "a", "B", "b"):
        await agents.PutAgent(put(name))
    first = await agents.ListAgents(agents_pb2.ListAgentsRequest(store_id="acme", page_size=3))
    rest = await agents.ListAgents(agents_pb2.ListAgentsRequest(store_id="acme", page_token=first.next_page_token))
    assert [agent.definition.name for agent in (*first.agents, *rest.agents)] == ["B", "a", "b", "c"]
    assert (
        await reason_of(agents.ListAgents(agents_pb2.ListAgentsRequest(store_id="x", page_token="x")))
        == "INVALID_PAGE_TOKEN"
    )
    assert await reason_of(ask(replica, "ListAgentVersions", name="a", page_token="x")) == "INVALID_PAGE_TOKEN"


async def test_concurrent_saves_cannot_create_a_delegation_cycle(start: StartReplica) -> None:
    stubs = [AgentLedgerServiceStub((await start()).channel) for _ in range(2)]
    for name in ("a", "b"):
        await stubs[0].PutAgent(put(name))
    ways = [stubs[0].PutAgent(put("a", delegates_to=["b"])), stubs[1].PutAgent(put("b", delegates_to=["a"]))]
    said = await asyncio.gather(*ways, return_exceptions=True)
    assert [from_rpc_error(each).reason for each in said if isinstance(each, grpc.aio.AioRpcError)] == ["AGENT_CYCLE"]


def draft(name: str = "clerk", *tools: str, user: str = "ann", **fields: Any) -> agents_pb2.PutDraftRequest:
    asked = put(name, *tools, **fields)
    return agents_pb2.PutDraftRequest(
        store_id=asked.store_id,
        user_id=user,
        credential_id=asked.credential_id,
        definition=asked.definition,
        tool_names=asked.tool_names,
        validate_only=asked.validate_only,
    )


async def test_a_draft_does_not_replace_the_agent_with_the_same_name(
    replica: Replica, agents: AgentLedgerServiceAsyncStub
) -> None:
    published = (await agents.PutAgent(put("clerk", "look"))).agent
    wanted = agents_pb2.GetDraftRequest(store_id="acme", user_id="ann", name="clerk")
    assert (await agents.PutDraft(draft("clerk", "mail", validate_only=True))).created
    assert await reason_of(agents.GetDraft(wanted)) == "AGENT_NOT_FOUND", "a check stores nothing"
    first = await agents.PutDraft(draft("clerk", "mail"))
    assert (first.created, first.agent.version, first.agent.draft) == (True, 1, True)
    same = await agents.PutDraft(draft("clerk", "mail"))
    assert (same.created, same.agent) == (False, first.agent)
    second = await agents.PutDraft(draft("clerk", "pay", "mail"))
    assert (second.created, second.agent.version, list(second.agent.tool_names)) == (True, 2, ["mail", "pay"])
    assert (await agents.GetDraft(wanted)).agent == second.agent
    assert (await agents.GetAgent(agents_pb2.GetAgentRequest(store_id="acme", name="clerk"))).agent == published
    await ask(replica, "DeleteDraft", name="clerk")
    assert await reason_of(ask(replica, "DeleteDraft", name="clerk")) == "AGENT_NOT_FOUND"
    assert await reason_of(agents.GetDraft(wanted)) == "AGENT_NOT_FOUND"


async def test_drafts_belong_to_one_user_of_one_store(replica: Replica, agents: AgentLedgerServiceAsyncStub) -> None:
    for name in ("c", "a", "b"):
        await agents.PutDraft(draft(name))
    for store_id, user_id in (("acme", "bob"), ("elsewhere", "ann")):
        whose: Any = {"store_id": store_id, "user_id": user_id}
        assert await reason_of(agents.GetDraft(agents_pb2.GetDraftRequest(**whose, name="a"))) == "AGENT_NOT_FOUND"
        assert await reason_of(ask(replica, "DeleteDraft", store=store_id, user=user_id, name="a")) == "AGENT_NOT_FOUND"
        assert not (await agents.ListDrafts(agents_pb2.ListDraftsRequest(**whose))).agents
    assert not (await agents.ListAgents(agents_pb2.ListAgentsRequest(store_id="acme"))).agents
    own: Any = {"store_id": "acme", "user_id": "ann"}
    first = await agents.ListDrafts(agents_pb2.ListDraftsRequest(**own, page_size=2))
    assert [agent.definition.name for agent in first.agents] == ["a", "b"]
    assert [
        agent.definition.name
        for agent in (
            await agents.ListDrafts(agents_pb2.ListDraftsRequest(**own, page_token=first.next_page_token))
        ).agents
    ] == ["c"]
    assert (
        await reason_of(agents.ListDrafts(agents_pb2.ListDraftsRequest(**own, page_token="x"))) == "INVALID_PAGE_TOKEN"
    )


def budget(tokens: int) -> agents_pb2.PutAgentRequest:
    return agents_pb2.PutAgentRequest(
        store_id="acme", user_id="root", definition=agent_pb2.AgentDefinition(name="clerk", daily_tokens_max=tokens)
    )


async def test_budget_usage_counts_from_midnight(replica: Replica) -> None:
    agents = AgentLedgerServiceStub(replica.channel)

    async def quota(name: str = "clerk") -> tuple[int, int] | None:
        asked = agents_pb2.GetModelTermsRequest(store_id="acme", user_id="ann", name=name)
        (found,) = (await agents.GetModelTerms(asked)).budgets or [None]
        if found is None:
            return None
        assert 0 < found.end_time.ToDatetime(tzinfo=UTC).timestamp() - time.time() <= 86_400
        assert found.kind == run_pb2.WAIT_KIND_AGENT_QUOTA
        return found.tokens_max, found.tokens_used

    assert await quota() is None
    await agents.PutAgent(budget(100))
    owner = await User(replica.stub).start(agent={"name": "clerk", "version": 1})
    await owner.commit(usage=run_pb2.Usage(input_tokens=90, cached_input_tokens=50, output_tokens=9))
    assert await quota() == (100, 99)
    assert await quota("other") is None
    await replica.database.execute("UPDATE job_store.usage_hours SET day = day - 1")
    assert await quota() == (100, 0)


async def test_runs_waiting_for_a_budget_check_it_again_when_it_changes(replica: Replica) -> None:
    agents, user = AgentLedgerServiceStub(replica.channel), User(replica.stub)
    await agents.PutAgent(budget(1))
    waiting = await user.start(agent={"name": "clerk", "version": 1})
    for owner in (waiting, await user.start(agent={"name": "other", "version": 1})):
        await owner.park(run_pb2.WAIT_KIND_AGENT_QUOTA, wake_time=datetime.now(UTC) + timedelta(days=1))
    assert (await user.run(waiting.run_id)).waiting.reason == waiting_pb2.WAIT_REASON_AGENT_QUOTA
    await agents.PutAgent(budget(1))
    assert not await user.claim(), "nothing has changed"
    await agents.PutAgent(budget(2))
    assert [run.run_id for run in await user.claim(runs_max=2)] == [waiting.run_id]


@pytest.fixture
def workflows(replica: Replica) -> WorkflowLedgerServiceAsyncStub:
    return WorkflowLedgerServiceStub(replica.channel)


def put_workflow(
    name: str = "triage", definition: bytes = b"{}", *uses: str, **fields: Any
) -> workflows_pb2.PutWorkflowRequest:
    validate_only = fields.pop("validate_only", False)
    workflow = workflow_pb2.WorkflowVersion(name=name, definition_json=definition, **fields)
    return workflows_pb2.PutWorkflowRequest(
        store_id="acme", user_id="ann", credential_id="key_1", workflow=workflow, uses=uses, validate_only=validate_only
    )


def named(name: str = "triage", version: int = 0, store: str = "acme") -> workflows_pb2.GetWorkflowRequest:
    return workflows_pb2.GetWorkflowRequest(store_id=store, name=name, version=version)


DELETE = workflows_pb2.DeleteWorkflowRequest(store_id="acme", user_id="ann", credential_id="key_1", name="triage")


async def test_workflow_versions_are_kept_and_never_changed(
    replica: Replica, workflows: WorkflowLedgerServiceAsyncStub
) -> None:
    assert (await workflows.PutWorkflow(put_workflow(validate_only=True))).created
    assert await reason_of(workflows.GetWorkflow(named())) == "WORKFLOW_NOT_FOUND", "a check stores nothing"
    first = await workflows.PutWorkflow(put_workflow(description="Sort it."))
    assert (first.created, first.workflow.version, first.workflow.create_user_id) == (True, 1, "ann")
    same = await workflows.PutWorkflow(put_workflow(description="Sort it."))
    assert (same.created, same.workflow) == (False, first.workflow)
    assert (await workflows.PutWorkflow(put_workflow(definition=b'{"a":1}'))).workflow.version == 2
    assert (await workflows.GetWorkflow(named(version=1))).workflow == first.workflow
    for missing in (named(version=3), named(version=2**32 - 1), named("other"), named(store="elsewhere")):
        assert await reason_of(workflows.GetWorkflow(missing)) == "WORKFLOW_NOT_FOUND"
    await workflows.DeleteWorkflow(DELETE)
    assert await reason_of(workflows.DeleteWorkflow(DELETE)) == "WORKFLOW_NOT_FOUND"
    assert await reason_of(workflows.GetWorkflow(named())) == "WORKFLOW_NOT_FOUND"
    assert (await workflows.GetWorkflow(named(version=2))).workflow.version == 2
    assert (await workflows.PutWorkflow(put_workflow())).workflow.version == 3, (
        "a new one continues the version numbers"
    )
    assert (await workflows.GetWorkflow(named())).workflow.version == 3


async def test_workflows_are_listed_by_name_without_definitions(
    replica: Replica, workflows: WorkflowLedgerServiceAsyncStub
) -> None:
    for name in ("c", "a", "b"):
        await workflows.PutWorkflow(put_workflow(name))
    first = await ask(replica, "ListWorkflows", page_size=2)
    rest = await ask(replica, "ListWorkflows", page_token=first.next_page_token)
    found = [(each.name, each.definition_json) for each in (*first.workflows, *rest.workflows)]
    assert found == [("a", b""), ("b", b""), ("c", b"")]


def user(name: str = "ann", *roles: str, store: str = "acme") -> Principal:
    return Principal(
        store_id=StoreId(store), user_id=UserId(name), credential_id=CredentialId("key_1"), roles=frozenset(roles)
    )


ADMIN = user("ann", "admin")


async def ask_as(replica: Replica, caller: Principal, method: str, **fields: Any) -> Any:
    return await translated(forwarded(replica.channel, caller, method, **fields))


async def declare(
    replica: Replica, caller: Principal = ADMIN, *, kind: str = "agent", name: str = "clerk", **f: Any
) -> Any:
    declaration = Declaration(kind=kind, name=name, **{"set": "shop"} | f)
    return (await ask_as(replica, caller, "PutDeclaration", declaration=declaration)).declaration


async def declared(replica: Replica, caller: Principal) -> list[tuple[str, str, str, int]]:
    found = (await ask_as(replica, caller, "ListDeclarations")).declarations
    return [(each.kind, each.name, each.set, each.version) for each in found]


async def test_one_of_two_concurrent_changes_gets_a_conflict_that_names_the_other_user(replica: Replica) -> None:
    assert (await declare(replica)).version == 1
    done = await asyncio.gather(
        *(declare(replica, user(name, "admin"), version=1, set=name) for name in ("bob", "eve")), return_exceptions=True
    )
    (refused,) = (each for each in done if isinstance(each, BaseException))
    (kept,) = (each for each in done if not isinstance(each, BaseException))
    assert isinstance(refused, Conflict)
    assert f"the agent 'clerk' was changed by {kept.update_user_id}, so version 1 is outdated" in refused.message
    assert await declared(replica, ADMIN) == [("agent", "clerk", kept.set, 2)]
    for version in (0, 1, 3):
        gone = Declaration(kind="agent", name="clerk", version=version)
        delete = ask_as(replica, ADMIN, "DeleteDeclaration", declaration=gone)
        await raises(Conflict, declare(replica, version=version), delete)
    gone = Declaration(kind="agent", name="clerk", version=2)
    await ask_as(replica, ADMIN, "DeleteDeclaration", declaration=gone)
    await raises(Conflict, declare(replica, version=2), match="has no declaration")
    assert (await declare(replica)).version == 1


async def test_declarations_of_users_and_stores_are_separate(replica: Replica) -> None:
    await declare(replica)
    await declare(replica, user("bob"), kind="schedule", name="daily", set="own")
    await declare(replica, kind="schedule", name="daily")
    assert await declared(replica, ADMIN) == [("agent", "clerk", "shop", 1), ("schedule", "daily", "shop", 1)]
    assert await declared(replica, user("bob")) == [("agent", "clerk", "shop", 1), ("schedule", "daily", "own", 1)]
    assert await declared(replica, user("ann", "admin", store="other")) == []


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"kind": "recipe"}, InvalidField),
        ({"name": ""}, InvalidField),
        ({"name": "a\nb"}, InvalidField),
        ({"version": 2**63}, InvalidField),
        ({"caller": user("bob")}, PermissionDenied),
    ],
)
async def test_invalid_declarations_are_refused(
    replica: Replica, fields: dict[str, Any], error: type[PawlError]
) -> None:
    await raises(error, declare(replica, **fields))


async def test_declarations_of_one_user_do_not_use_up_the_limit_of_others(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "DECLARATIONS_MAX", 1)
    bob = user("bob")
    await declare(replica, bob, kind="channel")
    await raises(TooLarge, declare(replica, bob, kind="trigger"))
    await declare(replica)
    await declare(replica, kind="channel")


async def test_a_set_is_leased_to_one_holder(replica: Replica) -> None:
    async def lease(holder_id: str, seconds: int, caller: Principal = ADMIN) -> None:
        await ask_as(replica, caller, "LeaseSet", set="shop", holder_id=holder_id, lease_seconds=seconds)

    await lease("one", 60)
    await lease("one", 60)
    await raises(Conflict, lease("two", 60), match="applying the set 'shop'")
    await lease("two", 60, user("bob", "member"))  # Private, like a member's resources.
    await lease("one", 0)
    await lease("two", 60)
    await raises(InvalidField, lease("two", 61), match="at most 60, got 61")


async def test_validation_saves_nothing(replica: Replica) -> None:
    schedule = ScheduleDefinition(name="daily", text="x", interval_seconds=60)
    trigger = TriggerDefinition(name="order", text="x", webhook=WebhookSource())
    definition: Any
    for kind, definition in (("Schedule", schedule), ("Trigger", trigger)):
        asked: dict[str, Any] = {"definition": definition, "validate_only": True}
        made = await ask_as(replica, ADMIN, f"Create{kind}", **asked)
        assert getattr(made, kind.lower()).definition.name == definition.name
        assert not getattr(made, "secret", "")
        await raises(PawlError, ask_as(replica, ADMIN, f"Update{kind}", **asked), match="You have no such")
        await ask_as(replica, ADMIN, f"Create{kind}", definition=definition)
        changed = type(definition)()
        changed.CopyFrom(definition)
        changed.text = "y"
        await ask_as(replica, ADMIN, f"Update{kind}", definition=changed, validate_only=True)
        found = await ask_as(replica, ADMIN, f"Get{kind}", name=definition.name)
        assert getattr(found, kind.lower()).definition.text == "x"
    bad = ScheduleDefinition(name="bad", text="x", cron="nonsense")
    await raises(
        InvalidField, ask_as(replica, ADMIN, "CreateSchedule", definition=bad, validate_only=True), match="cron"
    )
    await raises(ScheduleNotFound, ask_as(replica, ADMIN, "GetSchedule", name="bad"))
