"""Versions of agents over real gRPC and a real database."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pawl.chassis.status import from_rpc_error
from pawl.event.v1 import agent_pb2, run_pb2
from pawl.job.v1 import agents_pb2 as pb
from pawl.job.v1.agents_pb2_grpc import AgentLedgerServiceStub
from tests.rpc.job_store.conftest import Replica, StartReplica

if TYPE_CHECKING:
    from pawl.job.v1.agents_pb2_grpc import AgentLedgerServiceAsyncStub


@pytest.fixture
def agents(replica: Replica) -> AgentLedgerServiceAsyncStub:
    return AgentLedgerServiceStub(replica.channel)


def put(name: str = "clerk", *tools: str, store: str = "acme", **fields: Any) -> pb.PutAgentRequest:
    validate_only = fields.pop("validate_only", False)
    return pb.PutAgentRequest(
        store_id=store,
        user_id="ann",
        credential_id="key_1",
        definition=agent_pb2.AgentDefinition(name=name, **fields),
        tool_names=tools,
        validate_only=validate_only,
    )


async def reason(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_rpc_error(refused.value).reason


async def test_versions_are_kept_and_never_changed(agents: AgentLedgerServiceAsyncStub) -> None:
    options = run_pb2.RunOptions(instructions="Book it.", limits=run_pb2.RunLimits(rounds_max=3))
    first = await agents.PutAgent(put("clerk", "mail", "look", options=options))
    assert (first.created, first.agent.version, list(first.agent.tool_names)) == (True, 1, ["look", "mail"])
    same = await agents.PutAgent(put("clerk", "look", "mail", options=options))
    assert (same.created, same.agent) == (False, first.agent)
    more = await agents.PutAgent(put("clerk", "look", "mail", "pay", options=options))
    assert (more.created, more.agent.version) == (True, 2)
    read = await agents.GetAgent(pb.GetAgentRequest(store_id="acme", name="clerk", version=1))
    assert read.agent == first.agent
    assert (await agents.GetAgent(pb.GetAgentRequest(store_id="acme", name="clerk"))).agent == more.agent
    listed = await agents.ListAgentVersions(pb.ListAgentVersionsRequest(store_id="acme", name="clerk", page_size=1))
    assert [agent.version for agent in listed.agents] == [2]
    assert [
        agent.version
        for agent in (
            await agents.ListAgentVersions(
                pb.ListAgentVersionsRequest(store_id="acme", name="clerk", page_token=listed.next_page_token)
            )
        ).agents
    ] == [1]


async def test_of_a_deleted_agent_the_versions_stay(agents: AgentLedgerServiceAsyncStub) -> None:
    first = (await agents.PutAgent(put())).agent
    delete = pb.DeleteAgentRequest(store_id="acme", name="clerk", user_id="ann")
    await agents.DeleteAgent(delete)
    assert await reason(agents.DeleteAgent(delete)) == "AGENT_NOT_FOUND"
    assert await reason(agents.GetAgent(pb.GetAgentRequest(store_id="acme", name="clerk"))) == "AGENT_NOT_FOUND"
    assert not (await agents.ListAgents(pb.ListAgentsRequest(store_id="acme"))).agents
    kept = await agents.GetAgent(pb.GetAgentRequest(store_id="acme", name="clerk", version=1))
    assert kept.agent == first
    assert (await agents.PutAgent(put())).agent.version == 2, "made again it goes on with its numbers"
    assert (await agents.GetAgent(pb.GetAgentRequest(store_id="acme", name="clerk"))).agent.version == 2


async def test_stores_do_not_see_each_other(agents: AgentLedgerServiceAsyncStub) -> None:
    await agents.PutAgent(put())
    elsewhere: Any = {"store_id": "elsewhere", "name": "clerk"}
    assert await reason(agents.GetAgent(pb.GetAgentRequest(**elsewhere, version=1))) == "AGENT_NOT_FOUND"
    assert await reason(agents.ListAgentVersions(pb.ListAgentVersionsRequest(**elsewhere))) == "AGENT_NOT_FOUND"
    assert await reason(agents.DeleteAgent(pb.DeleteAgentRequest(**elsewhere, user_id="ann"))) == "AGENT_NOT_FOUND"
    assert await reason(agents.PutAgent(put("boss", store="elsewhere", delegates_to=["clerk"]))) == "AGENT_NOT_FOUND"


async def test_agents_are_listed_by_name_in_pages(agents: AgentLedgerServiceAsyncStub) -> None:
    for name in ("c", "a", "B", "b"):
        await agents.PutAgent(put(name))
    found: list[str] = []
    token = ""
    for _ in range(10):
        page = await agents.ListAgents(pb.ListAgentsRequest(store_id="acme", page_size=3, page_token=token))
        found += [agent.definition.name for agent in page.agents]
        token = page.next_page_token
        if not token:
            break
    assert found == ["B", "a", "b", "c"]
    assert await reason(agents.ListAgents(pb.ListAgentsRequest(store_id="x", page_token="x"))) == "INVALID_PAGE_TOKEN"
    versions = pb.ListAgentVersionsRequest(store_id="acme", name="a", page_token="x")
    assert await reason(agents.ListAgentVersions(versions)) == "INVALID_PAGE_TOKEN"


async def test_two_that_are_saved_at_once_make_no_circle(start: StartReplica) -> None:
    stubs = [AgentLedgerServiceStub((await start()).channel) for _ in range(2)]
    for name in ("a", "b"):
        await stubs[0].PutAgent(put(name))
    ways = [stubs[0].PutAgent(put("a", delegates_to=["b"])), stubs[1].PutAgent(put("b", delegates_to=["a"]))]
    said = await asyncio.gather(*ways, return_exceptions=True)
    refused = [from_rpc_error(each).reason for each in said if isinstance(each, grpc.aio.AioRpcError)]
    assert refused == ["AGENT_CYCLE"]


def draft(name: str = "clerk", *tools: str, user: str = "ann", **fields: Any) -> pb.PutDraftRequest:
    asked = put(name, *tools, **fields)
    return pb.PutDraftRequest(
        store_id=asked.store_id,
        user_id=user,
        credential_id=asked.credential_id,
        definition=asked.definition,
        tool_names=asked.tool_names,
        validate_only=asked.validate_only,
    )


async def test_a_draft_is_kept_once_beside_the_agent_of_its_name(agents: AgentLedgerServiceAsyncStub) -> None:
    published = (await agents.PutAgent(put("clerk", "look"))).agent
    wanted = pb.GetDraftRequest(store_id="acme", user_id="ann", name="clerk")
    assert (await agents.PutDraft(draft("clerk", "mail", validate_only=True))).created
    assert await reason(agents.GetDraft(wanted)) == "AGENT_NOT_FOUND", "a check keeps nothing"
    first = await agents.PutDraft(draft("clerk", "mail"))
    assert (first.created, first.agent.version, first.agent.draft) == (True, 1, True)
    same = await agents.PutDraft(draft("clerk", "mail"))
    assert (same.created, same.agent) == (False, first.agent)
    second = await agents.PutDraft(draft("clerk", "pay", "mail"))
    assert (second.created, second.agent.version, list(second.agent.tool_names)) == (True, 2, ["mail", "pay"])
    assert (await agents.GetDraft(wanted)).agent == second.agent
    assert (await agents.GetAgent(pb.GetAgentRequest(store_id="acme", name="clerk"))).agent == published
    delete = pb.DeleteDraftRequest(store_id="acme", user_id="ann", name="clerk")
    await agents.DeleteDraft(delete)
    assert await reason(agents.DeleteDraft(delete)) == "AGENT_NOT_FOUND"
    assert await reason(agents.GetDraft(wanted)) == "AGENT_NOT_FOUND"


async def test_drafts_are_of_one_user_of_one_store(agents: AgentLedgerServiceAsyncStub) -> None:
    for name in ("c", "a", "b"):
        await agents.PutDraft(draft(name))
    for store, user in (("acme", "bob"), ("elsewhere", "ann")):
        whose: Any = {"store_id": store, "user_id": user}
        assert await reason(agents.GetDraft(pb.GetDraftRequest(**whose, name="a"))) == "AGENT_NOT_FOUND"
        assert await reason(agents.DeleteDraft(pb.DeleteDraftRequest(**whose, name="a"))) == "AGENT_NOT_FOUND"
        assert not (await agents.ListDrafts(pb.ListDraftsRequest(**whose))).agents
    assert not (await agents.ListAgents(pb.ListAgentsRequest(store_id="acme"))).agents
    own: Any = {"store_id": "acme", "user_id": "ann"}
    first = await agents.ListDrafts(pb.ListDraftsRequest(**own, page_size=2))
    assert [agent.definition.name for agent in first.agents] == ["a", "b"]
    assert [
        agent.definition.name
        for agent in (await agents.ListDrafts(pb.ListDraftsRequest(**own, page_token=first.next_page_token))).agents
    ] == ["c"]
    assert await reason(agents.ListDrafts(pb.ListDraftsRequest(**own, page_token="x"))) == "INVALID_PAGE_TOKEN"
