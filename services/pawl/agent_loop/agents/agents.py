"""Agents, for those who make and use them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from msgspec.structs import replace

from pawl.agent_loop.agents import rules as agents
from pawl.agent_loop.agents.ledger import AgentLedger
from pawl.agent_loop.agents.rules import DEFAULT, AgentDefinition, AgentVersion
from pawl.agent_loop.api.ports import OutputChecker, ToolFinder
from pawl.agent_loop.api.values import Page, PageAsked
from pawl.agent_loop.loop.rules.options import RunDefaults
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import StoreId
from pawl.chassis.labels import check_labels, has_all
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.errors import AgentNotFound

DEFAULT_SECONDS_MAX: Final = 5.0
"""So long a store's new `default` may not hold yet."""
_STORES_KEPT_MAX: Final = 10_000

_log = logs.get_logger(__name__)


class Saved(NamedTuple):
    """The newest version of an agent, whether it was made now, and what its selection does not match."""

    agent: AgentVersion
    created: bool
    unmatched: tuple[str, ...]


class Agents:
    """Makes agents and finds them. To who may not use one it is not there."""

    def __init__(
        self,
        *,
        ledger: AgentLedger,
        tools: ToolFinder,
        checker: OutputChecker,
        clock: Clock,
        defaults: RunDefaults,
    ) -> None:
        self._ledger = ledger
        self._checker = checker
        self._tools = tools
        self._defaults = defaults
        self._clock = clock
        self._of_stores: dict[StoreId, tuple[AgentVersion | None, float]] = {}

    async def update(self, caller: Principal, definition: AgentDefinition, *, validate_only: bool) -> Saved:
        """Save an agent with the tools that it selects now; what is equal to its newest version makes none.

        Raises:
            InvalidField, InvalidId, TooLarge: it cannot be meant so, or there are too many.
            ToolNotFound, AgentNotFound: it names what is not there.
            InvalidSchema: the schema of its response format cannot be used.
            AgentCycle: it would be given tasks of its own.
        """
        definition = agents.check(definition, self._defaults)
        names, unmatched = await self._select(caller, definition)
        agent, created = await self._ledger.put_agent(caller, definition, names, validate_only=validate_only)
        if created and not validate_only:
            self._of_stores.pop(caller.store_id, None)
            _log.info("agent.saved", store=caller.store_id, user=caller.user_id, agent=definition.name)
        return Saved(agent, created, unmatched)

    async def update_draft(self, caller: Principal, definition: AgentDefinition, *, validate_only: bool) -> Saved:
        """Save a draft of the caller with the tools that it selects now; what is equal to it changes nothing.

        Raises: as `update`; AgentNotFound also for agents that the caller may not use.
        """
        definition = agents.check_draft(definition, self._defaults)
        names, unmatched = await self._select(caller, definition)
        for name in definition.delegates_to:
            if name != definition.name and not (await self._newest(caller, name)).may_be_used_with(caller.roles):
                raise AgentNotFound(f"delegates_to: there is no agent {name!r} that you may use", agent=name)
        agent, created = await self._ledger.put_draft(caller, definition, names, validate_only=validate_only)
        if created and not validate_only:
            _log.info("agent.draft_saved", store=caller.store_id, user=caller.user_id, agent=definition.name)
        return Saved(agent, created, unmatched)

    async def _select(self, caller: Principal, definition: AgentDefinition) -> agents.Selected:
        form = definition.options.response_format
        if form is not None:
            await self._checker.check_output(caller.store_id, form.schema_json, None)
        needs_tools = not definition.tools.is_open
        return agents.select(definition, await self._tools.offered(caller) if needs_tools else ())

    async def _newest(self, caller: Principal, name: str) -> AgentVersion:
        try:
            return await self._ledger.get_agent(caller.store_id, name, 0)
        except AgentNotFound:
            raise AgentNotFound(f"delegates_to: there is no agent {name!r}: make it first", agent=name) from None

    async def get(self, caller: Principal, name: str, version: int) -> AgentVersion:
        """Return a version; 0 for the newest. Drafts are named as runs name them.

        Raises:
            AgentNotFound
        """
        if draft := agents.draft_name(name):
            found = await self._ledger.get_draft(caller.store_id, caller.user_id, draft)
            if version not in {0, found.version}:
                raise AgentNotFound
            return found
        try:
            found = await self._ledger.get_agent(caller.store_id, name, version)
        except AgentNotFound:
            if name != DEFAULT or version:
                raise
            found = agents.deployed(self._defaults)
        if not found.may_be_seen_with(caller.roles) or (version and await self._is_hidden(caller, name)):
            raise AgentNotFound
        return found

    async def _is_hidden(self, caller: Principal, name: str) -> bool:
        """Return whether the caller may not see the newest version of an agent: then it may see none."""
        with suppress(AgentNotFound):
            return not (await self._ledger.get_agent(caller.store_id, name, 0)).may_be_seen_with(caller.roles)
        return False

    async def list(self, caller: Principal, page: PageAsked, labels: Mapping[str, str]) -> Page[AgentVersion]:
        """Return the newest versions of agents with all of some labels, by name.

        The deployment's `default` is first where the store has none.

        Raises:
            InvalidPageToken
            InvalidField: a label cannot be one.
        """
        wanted = check_labels(labels)
        found = await self._ledger.list_agents(caller.store_id, page)
        items = tuple(agent for agent in found.items if agent.may_be_seen_with(caller.roles))
        if not page.page_token and (await self.get(caller, DEFAULT, 0)).version == 0:
            items = (agents.deployed(self._defaults), *items)
        return replace(found, items=tuple(agent for agent in items if has_all(agent.definition.labels, wanted)))

    async def list_drafts(self, caller: Principal, page: PageAsked, labels: Mapping[str, str]) -> Page[AgentVersion]:
        """Return the drafts of the caller with all of some labels, by name.

        Raises:
            InvalidPageToken
            InvalidField: a label cannot be one.
        """
        wanted = check_labels(labels)
        found = await self._ledger.list_drafts(caller.store_id, caller.user_id, page)
        return replace(found, items=tuple(agent for agent in found.items if has_all(agent.definition.labels, wanted)))

    async def of_run(self, caller: Principal, name: str) -> AgentVersion | None:
        """Return the newest version of the agent of a new run; None for the `default` of the deployment.

        That of the store, which an empty name means too, may be as old as DEFAULT_SECONDS_MAX.

        Raises:
            AgentNotFound
        """
        if draft := agents.draft_name(name):
            return await self._ledger.get_draft(caller.store_id, caller.user_id, draft)
        if name and name != DEFAULT:
            found = await self._ledger.get_agent(caller.store_id, name, 0)
            if not found.may_be_used_with(caller.roles):
                raise AgentNotFound
            return found
        now = self._clock.monotonic()
        known = self._of_stores.get(caller.store_id)
        if known is None or known[1] <= now:
            while len(self._of_stores) >= _STORES_KEPT_MAX:
                self._of_stores.pop(next(iter(self._of_stores)))
            known = self._of_stores[caller.store_id] = (await self._of_store(caller), now + DEFAULT_SECONDS_MAX)
        return known[0]

    async def _of_store(self, caller: Principal) -> AgentVersion | None:
        with suppress(AgentNotFound):
            return await self._ledger.get_agent(caller.store_id, DEFAULT, 0)
        return None
