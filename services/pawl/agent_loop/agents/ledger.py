"""The ledger's agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import grpc

from pawl.agent.v1.agents_pb2 import ListAgentsRequest
from pawl.agent_loop.agents.rules import AgentDefinition, AgentQuota, AgentVersion
from pawl.agent_loop.loop import wire
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.rpc.client import translated
from pawl.errors import AgentNotFound
from pawl.event.v1 import agent_pb2
from pawl.job.v1 import agents_pb2 as pb
from pawl.job.v1 import agents_pb2_grpc

_DEFINITION: Final = wire.WIRE.struct(AgentDefinition, agent_pb2.AgentDefinition)
VERSION: Final = wire.WIRE.struct(AgentVersion, agent_pb2.AgentVersion)
_QUOTA: Final = wire.WIRE.struct(AgentQuota, pb.GetAgentQuotaResponse)


class AgentLedger:
    """The ledger's agents, over a channel to job-store. It makes no retries.

    Every method may raise DependencyUnavailable and then be called again.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = agents_pb2_grpc.AgentLedgerServiceStub(channel)

    async def put(
        self,
        caller: Principal,
        definition: AgentDefinition,
        tool_names: tuple[str, ...],
        *,
        draft: bool,
        validate_only: bool,
    ) -> tuple[AgentVersion, bool]:
        """Keep a new version or a draft, unless it is equal to the newest; return the newest, and whether it is new.

        Raises:
            AgentNotFound: it delegates to one that is not there.
            AgentCycle, TooLarge
        """
        fields: dict[str, Any] = {
            "store_id": caller.store_id,
            "user_id": caller.user_id,
            "credential_id": caller.credential_id,
            "definition": _DEFINITION.fields(definition),
            "tool_names": tool_names,
            "validate_only": validate_only,
        }
        response: pb.PutAgentResponse | pb.PutDraftResponse
        if draft:
            response = await translated(self._stub.PutDraft(pb.PutDraftRequest(**fields)))
        else:
            response = await translated(self._stub.PutAgent(pb.PutAgentRequest(**fields)))
        return VERSION.read(response.agent), response.created

    async def get_agent(self, store_id: StoreId, name: str, version: int) -> AgentVersion:
        """Read a version; 0 for the newest of an agent that is not deleted.

        Raises:
            AgentNotFound
        """
        request = pb.GetAgentRequest(store_id=store_id, name=name, version=version)
        response = await translated(self._stub.GetAgent(request))
        if not response.HasField("agent"):
            raise AgentNotFound
        return VERSION.read(response.agent)

    async def list(self, caller: Principal, asked: ListAgentsRequest) -> tuple[Sequence[AgentVersion], str]:
        """Read the newest versions of all that are not deleted or the drafts of a user, and the token of the next page.

        Raises:
            InvalidPageToken
        """
        page: dict[str, Any] = {
            "store_id": caller.store_id,
            "page_size": asked.page_size,
            "page_token": asked.page_token,
        }
        response: pb.ListAgentsResponse | pb.ListDraftsResponse
        if asked.drafts:
            response = await translated(self._stub.ListDrafts(pb.ListDraftsRequest(user_id=caller.user_id, **page)))
        else:
            response = await translated(self._stub.ListAgents(pb.ListAgentsRequest(**page)))
        return [*map(VERSION.read, response.agents)], response.next_page_token

    async def agent_quota(self, store_id: StoreId, name: str) -> AgentQuota:
        request = pb.GetAgentQuotaRequest(store_id=store_id, name=name)
        return _QUOTA.read(await translated(self._stub.GetAgentQuota(request)))

    async def get_draft(self, store_id: StoreId, user_id: UserId, name: str) -> AgentVersion:
        """Read a draft of a user.

        Raises:
            AgentNotFound
        """
        request = pb.GetDraftRequest(store_id=store_id, user_id=user_id, name=name)
        return VERSION.read((await translated(self._stub.GetDraft(request))).agent)
