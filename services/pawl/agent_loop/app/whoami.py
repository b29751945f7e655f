"""The caller and the deployment, as the caller is told about them."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import msgspec

from pawl.agent_loop.app.agents import Agents
from pawl.agent_loop.app.approvers import decision_right
from pawl.agent_loop.app.public_ports import CallChecker
from pawl.agent_loop.app.public_values import PageAsked
from pawl.agent_loop.domain.limits import Limits
from pawl.agent_loop.domain.options import RunDefaults
from pawl.chassis.auth import Principal
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.chassis.roles import CALLERS
from pawl.errors import PawlError
from pawl.values.command import DecisionRight

_AGENTS_MAX: Final = 200
_DECIDE: Final = "/pawl.agent.v1.AgentService/Decide"


class CallerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The caller: what its credential says, and what follows. See pawl.agent.v1.CallerInfo."""

    store_id: StoreId
    user_id: UserId
    roles: frozenset[str]
    credential_id: CredentialId
    delegate_user_id: UserId
    expire_time: float | None
    decision_right: DecisionRight | None
    methods: tuple[str, ...]


class DeploymentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The offer of the deployment. See pawl.agent.v1.DeploymentInfo."""

    version: str
    model: str
    limits: Limits
    ceilings: Limits
    approvals_required: int
    tool_count: int | None
    agent_names: tuple[str, ...]
    part_kinds: tuple[str, ...]


class Introduction(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a caller that asks who it is."""

    caller: CallerInfo
    deployment: DeploymentInfo


class Introductions:
    """Tells callers who they are and what there is for them."""

    def __init__(
        self, *, checker: CallChecker, agents: Agents, defaults: RunDefaults, takes_images: bool, version: str
    ) -> None:
        self._checker = checker
        self._agents = agents
        self._defaults = defaults
        self._version = version
        self._part_kinds = ("text", "file", *(("image",) if takes_images else ()))

    async def introduce(self, caller: Principal) -> Introduction:
        """Return what `caller` needs to know; without its tools or agents while others do not say what there are."""
        tool_count: int | None = None
        agent_names: tuple[str, ...] = ()
        if caller.store_id:
            with suppress(PawlError):
                tool_count = await self._checker.count_tools(caller)
            with suppress(PawlError):
                agent_names = await self._agent_names(caller)
        return Introduction(caller=caller_info(caller), deployment=self._deployment(tool_count, agent_names))

    async def _agent_names(self, caller: Principal) -> tuple[str, ...]:
        first = PageAsked(page_size=_AGENTS_MAX, page_token="")
        found = [*(await self._agents.list(caller, first, {})).items]
        found += (await self._agents.list_drafts(caller, first, {})).items
        usable = (agent for agent in found if agent.may_be_used_with(caller.roles))
        return tuple(sorted(agent.run_name for agent in usable))[:_AGENTS_MAX]

    def _deployment(self, tool_count: int | None, agent_names: tuple[str, ...]) -> DeploymentInfo:
        defaults = self._defaults
        return DeploymentInfo(
            version=self._version,
            model=defaults.model,
            limits=defaults.limits,
            ceilings=defaults.ceilings,
            approvals_required=max(1, defaults.approvals_required),
            tool_count=tool_count,
            agent_names=agent_names,
            part_kinds=self._part_kinds,
        )


def caller_info(caller: Principal) -> CallerInfo:
    """Return who `caller` is, and what it may do."""
    methods = tuple(sorted(name for name, callers in CALLERS.items() if not callers.isdisjoint(caller.rights)))
    return CallerInfo(
        store_id=caller.store_id,
        user_id=caller.user_id,
        roles=caller.roles,
        credential_id=caller.credential_id,
        delegate_user_id=caller.delegate_user_id,
        expire_time=caller.expires_at,
        decision_right=decision_right(caller) if caller.decides and _DECIDE in methods else None,
        methods=methods,
    )
