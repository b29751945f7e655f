from __future__ import annotations

from contextlib import suppress
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent.v1.agents_pb2 import ListAgentsRequest
from pawl.agent.v1.whoami_pb2 import CallerInfo, DeploymentInfo, WhoAmIResponse
from pawl.agent_loop.agents.agents import Agents
from pawl.agent_loop.api.approvers import decision_right
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.rules.options import RunDefaults
from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.roles import CALLERS
from pawl.chassis.rpc.translate import timestamp
from pawl.errors import PawlError

_AGENTS_MAX: Final = 200
_DECIDE: Final = "/pawl.agent.v1.AgentService/Decide"


class Introductions:
    def __init__(
        self, *, registry: RegistryClient, agents: Agents, defaults: RunDefaults, takes_images: bool, version: str
    ) -> None:
        self._registry = registry
        self._agents = agents
        self._defaults = defaults
        self._version = version
        self._part_kinds = ("text", "file", *(("image",) if takes_images else ()))

    async def introduce(self, caller: Principal) -> WhoAmIResponse:
        """Describe `caller` and the deployment. Omit the tools or agents if their service is unavailable."""
        tool_count: int | None = None
        agent_names: tuple[str, ...] = ()
        if caller.store_id:
            with suppress(PawlError):
                tool_count = await self._registry.count_tools(caller)
            with suppress(PawlError):
                agent_names = await self._agent_names(caller)
        defaults = self._defaults
        deployment = DeploymentInfo(
            version=self._version,
            model=defaults.model,
            limits=wire.LIMITS.fields(defaults.limits),
            ceilings=wire.LIMITS.fields(defaults.ceilings),
            approvals_required=max(1, defaults.approvals_required),
            tool_count=tool_count,
            agent_names=agent_names,
            part_kinds=self._part_kinds,
        )
        return WhoAmIResponse(caller=caller_info(caller), deployment=deployment)

    async def _agent_names(self, caller: Principal) -> tuple[str, ...]:
        first = (ListAgentsRequest(page_size=_AGENTS_MAX, drafts=drafts) for drafts in (False, True))
        found = [agent for request in first for agent in (await self._agents.list(caller, request))[0]]
        usable = (agent for agent in found if agent.may_be_used_with(caller.roles))
        return tuple(sorted(agent.run_name for agent in usable))[:_AGENTS_MAX]


def caller_info(caller: Principal) -> CallerInfo:
    methods = tuple(sorted(name for name, callers in CALLERS.items() if not callers.isdisjoint(caller.rights)))
    right = decision_right(caller).value if caller.decides and _DECIDE in methods else 0
    return CallerInfo(
        store_id=caller.store_id,
        user_id=caller.user_id,
        roles=sorted(caller.roles),
        credential_id=caller.credential_id,
        delegate_user_id=caller.delegate_user_id,
        expire_time=None if caller.expires_at is None else Timestamp(**timestamp(caller.expires_at)),
        decision_right=right,  # type: ignore[arg-type]  # the same numbers
        methods=methods,
    )
