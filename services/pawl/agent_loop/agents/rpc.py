"""Serves the methods of pawl.agent.v1.AgentRegistryService that need tools or defaults.

The other methods are forwarded to job-store.
"""

from __future__ import annotations

from typing import Final

from pawl.agent.v1 import agents_pb2 as pb
from pawl.agent_loop.agents.agents import VERSION, Agents
from pawl.agent_loop.agents.rules import AgentDefinition
from pawl.agent_loop.api import convert
from pawl.chassis.identity.auth import require_decider, require_user
from pawl.chassis.ids import check_agent_name
from pawl.chassis.rpc.kinds import Context
from pawl.errors import AgentNotFound
from pawl.event.v1 import agent_pb2

_DEFINITION: Final = convert.WIRE.struct(AgentDefinition, agent_pb2.AgentDefinition, field="definition")
_VERSION_MAX: Final = 2**31 - 1


class AgentRegistryServicer:
    """Implements the methods that job-store cannot answer on its own."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents

    async def UpdateAgent(self, request: pb.UpdateAgentRequest, context: Context) -> pb.UpdateAgentResponse:
        caller, definition = require_decider(), _DEFINITION.read(request.definition)
        saved = await self._agents.update(caller, definition, draft=False, validate_only=request.validate_only)
        return pb.UpdateAgentResponse(**saved)

    async def GetAgent(self, request: pb.GetAgentRequest, context: Context) -> pb.GetAgentResponse:
        check_agent_name(request.name, "name")
        if request.version > _VERSION_MAX:
            raise AgentNotFound
        found = await self._agents.get(require_user(), request.name, request.version)
        return pb.GetAgentResponse(agent=VERSION.write(found))

    async def ListAgents(self, request: pb.ListAgentsRequest, context: Context) -> pb.ListAgentsResponse:
        found, token = await self._agents.list(require_user(), request)
        return pb.ListAgentsResponse(agents=map(VERSION.write, found), next_page_token=token)

    async def UpdateDraft(self, request: pb.UpdateDraftRequest, context: Context) -> pb.UpdateDraftResponse:
        caller, definition = require_user(), _DEFINITION.read(request.definition)
        saved = await self._agents.update(caller, definition, draft=True, validate_only=request.validate_only)
        return pb.UpdateDraftResponse(**saved)
