"""The ledger's agents."""

from __future__ import annotations

from typing import Any, Final

import grpc
from msgspec.structs import asdict

from pawl.agent_loop.adapters import wire
from pawl.agent_loop.app.public_values import Page, PageAsked
from pawl.agent_loop.domain.agents import AgentDefinition, AgentQuota, AgentUsage, AgentVersion
from pawl.chassis.auth import Principal
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.rpc_client import translated
from pawl.errors import AgentNotFound
from pawl.event.v1 import agent_pb2
from pawl.job.v1 import agents_pb2 as pb
from pawl.job.v1 import agents_pb2_grpc

_DEFINITION: Final = wire.WIRE.struct(AgentDefinition, agent_pb2.AgentDefinition)
_VERSION: Final = wire.WIRE.struct(AgentVersion, agent_pb2.AgentVersion)
_QUOTA: Final = wire.WIRE.struct(AgentQuota, pb.GetAgentQuotaResponse)
_USAGE: Final = wire.WIRE.struct(AgentUsage, agent_pb2.AgentUsage)


class AgentLedgerClient:
    """An `AgentLedger` over a channel to job-store. It makes no retries."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = agents_pb2_grpc.AgentLedgerServiceStub(channel)

    async def put_agent(
        self, caller: Principal, definition: AgentDefinition, tool_names: tuple[str, ...], *, validate_only: bool
    ) -> tuple[AgentVersion, bool]:
        request = pb.PutAgentRequest(**_put(caller, definition, tool_names, validate_only=validate_only))
        response = await translated(self._stub.PutAgent(request))
        return _VERSION.read(response.agent), response.created

    async def get_agent(self, store_id: StoreId, name: str, version: int) -> AgentVersion:
        request = pb.GetAgentRequest(store_id=store_id, name=name, version=version)
        response = await translated(self._stub.GetAgent(request))
        if not response.HasField("agent"):
            raise AgentNotFound
        return _VERSION.read(response.agent)

    async def list_agents(self, store_id: StoreId, page: PageAsked) -> Page[AgentVersion]:
        response = await translated(self._stub.ListAgents(pb.ListAgentsRequest(store_id=store_id, **asdict(page))))
        return _page(response)

    async def list_agent_versions(self, store_id: StoreId, name: str, page: PageAsked) -> Page[AgentVersion]:
        request = pb.ListAgentVersionsRequest(store_id=store_id, name=name, **asdict(page))
        return _page(await translated(self._stub.ListAgentVersions(request)))

    async def delete_agent(self, caller: Principal, name: str) -> None:
        request = pb.DeleteAgentRequest(
            store_id=caller.store_id, user_id=caller.user_id, credential_id=caller.credential_id, name=name
        )
        await translated(self._stub.DeleteAgent(request))

    async def agent_usage(self, store_id: StoreId, name: str, days: int) -> tuple[AgentUsage, ...]:
        request = pb.GetAgentUsageRequest(store_id=store_id, name=name, days=days)
        return tuple(map(_USAGE.read, (await translated(self._stub.GetAgentUsage(request))).days))

    async def agent_quota(self, store_id: StoreId, name: str) -> AgentQuota:
        request = pb.GetAgentQuotaRequest(store_id=store_id, name=name)
        return _QUOTA.read(await translated(self._stub.GetAgentQuota(request)))

    async def put_draft(
        self, caller: Principal, definition: AgentDefinition, tool_names: tuple[str, ...], *, validate_only: bool
    ) -> tuple[AgentVersion, bool]:
        request = pb.PutDraftRequest(**_put(caller, definition, tool_names, validate_only=validate_only))
        response = await translated(self._stub.PutDraft(request))
        return _VERSION.read(response.agent), response.created

    async def get_draft(self, store_id: StoreId, user_id: UserId, name: str) -> AgentVersion:
        request = pb.GetDraftRequest(store_id=store_id, user_id=user_id, name=name)
        return _VERSION.read((await translated(self._stub.GetDraft(request))).agent)

    async def list_drafts(self, store_id: StoreId, user_id: UserId, page: PageAsked) -> Page[AgentVersion]:
        request = pb.ListDraftsRequest(store_id=store_id, user_id=user_id, **asdict(page))
        return _page(await translated(self._stub.ListDrafts(request)))

    async def delete_draft(self, caller: Principal, name: str) -> None:
        request = pb.DeleteDraftRequest(store_id=caller.store_id, user_id=caller.user_id, name=name)
        await translated(self._stub.DeleteDraft(request))


def _put(
    caller: Principal, definition: AgentDefinition, tool_names: tuple[str, ...], *, validate_only: bool
) -> dict[str, Any]:
    return {
        "store_id": caller.store_id,
        "user_id": caller.user_id,
        "credential_id": caller.credential_id,
        "definition": _DEFINITION.fields(definition),
        "tool_names": tool_names,
        "validate_only": validate_only,
    }


def _page(
    response: pb.ListAgentsResponse | pb.ListAgentVersionsResponse | pb.ListDraftsResponse,
) -> Page[AgentVersion]:
    return Page(items=tuple(map(_VERSION.read, response.agents)), next_page_token=response.next_page_token)
