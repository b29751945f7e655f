"""The ledger's agents."""

from __future__ import annotations

from typing import Any, Final

import grpc
from msgspec.structs import asdict

from pawl.agent_loop.agents.rules import AgentDefinition, AgentQuota, AgentVersion
from pawl.agent_loop.api.values import Page, PageAsked
from pawl.agent_loop.loop import wire
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.rpc.client import translated
from pawl.errors import AgentNotFound
from pawl.event.v1 import agent_pb2
from pawl.job.v1 import agents_pb2 as pb
from pawl.job.v1 import agents_pb2_grpc

_DEFINITION: Final = wire.WIRE.struct(AgentDefinition, agent_pb2.AgentDefinition)
_VERSION: Final = wire.WIRE.struct(AgentVersion, agent_pb2.AgentVersion)
_QUOTA: Final = wire.WIRE.struct(AgentQuota, pb.GetAgentQuotaResponse)


class AgentLedger:
    """The ledger's agents, over a channel to job-store. It makes no retries.

    Every method may raise DependencyUnavailable and then be called again.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = agents_pb2_grpc.AgentLedgerServiceStub(channel)

    async def put_agent(
        self, caller: Principal, definition: AgentDefinition, tool_names: tuple[str, ...], *, validate_only: bool
    ) -> tuple[AgentVersion, bool]:
        """Keep a new version, unless it is equal to the newest; return the newest, and whether it is new.

        Raises:
            AgentNotFound: it delegates to one that is not there.
            AgentCycle, TooLarge
        """
        request = pb.PutAgentRequest(**_put(caller, definition, tool_names, validate_only=validate_only))
        response = await translated(self._stub.PutAgent(request))
        return _VERSION.read(response.agent), response.created

    async def get_agent(self, store_id: StoreId, name: str, version: int) -> AgentVersion:
        """Read a version; 0 for the newest of an agent that is not deleted.

        Raises:
            AgentNotFound
        """
        request = pb.GetAgentRequest(store_id=store_id, name=name, version=version)
        response = await translated(self._stub.GetAgent(request))
        if not response.HasField("agent"):
            raise AgentNotFound
        return _VERSION.read(response.agent)

    async def list_agents(self, store_id: StoreId, page: PageAsked) -> Page[AgentVersion]:
        """Read the newest versions of all that are not deleted, by name.

        Raises:
            InvalidPageToken
        """
        response = await translated(self._stub.ListAgents(pb.ListAgentsRequest(store_id=store_id, **asdict(page))))
        return _page(response)

    async def agent_quota(self, store_id: StoreId, name: str) -> AgentQuota:
        request = pb.GetAgentQuotaRequest(store_id=store_id, name=name)
        return _QUOTA.read(await translated(self._stub.GetAgentQuota(request)))

    async def put_draft(
        self, caller: Principal, definition: AgentDefinition, tool_names: tuple[str, ...], *, validate_only: bool
    ) -> tuple[AgentVersion, bool]:
        """Keep a draft of the caller, unless it is equal to the one of its name; as `put_agent`."""
        request = pb.PutDraftRequest(**_put(caller, definition, tool_names, validate_only=validate_only))
        response = await translated(self._stub.PutDraft(request))
        return _VERSION.read(response.agent), response.created

    async def get_draft(self, store_id: StoreId, user_id: UserId, name: str) -> AgentVersion:
        """Read a draft of a user.

        Raises:
            AgentNotFound
        """
        request = pb.GetDraftRequest(store_id=store_id, user_id=user_id, name=name)
        return _VERSION.read((await translated(self._stub.GetDraft(request))).agent)

    async def list_drafts(self, store_id: StoreId, user_id: UserId, page: PageAsked) -> Page[AgentVersion]:
        """Read the drafts of a user, by name.

        Raises:
            InvalidPageToken
        """
        request = pb.ListDraftsRequest(store_id=store_id, user_id=user_id, **asdict(page))
        return _page(await translated(self._stub.ListDrafts(request)))


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
    response: pb.ListAgentsResponse | pb.ListDraftsResponse,
) -> Page[AgentVersion]:
    return Page(items=tuple(map(_VERSION.read, response.agents)), next_page_token=response.next_page_token)
