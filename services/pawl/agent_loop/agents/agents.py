"""Creates, reads and lists agent definitions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import grpc

from pawl.agent.v1.agents_pb2 import ListAgentsRequest
from pawl.agent_loop.agents import rules as agents
from pawl.agent_loop.agents.rules import DEFAULT, AgentDefinition, AgentVersion, ModelTerms
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.rules.options import RunDefaults
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.labels import check_labels, has_all
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.client import translated
from pawl.errors import AgentNotFound
from pawl.event.v1 import agent_pb2
from pawl.job.v1 import agents_pb2 as pb
from pawl.job.v1 import agents_pb2_grpc

_DEFINITION: Final = wire.WIRE.struct(AgentDefinition, agent_pb2.AgentDefinition)
VERSION: Final = wire.WIRE.struct(AgentVersion, agent_pb2.AgentVersion)
_TERMS: Final = wire.WIRE.struct(ModelTerms, pb.GetModelTermsResponse)


class AgentLedger:
    """A client for job-store's agent API.

    It does not retry. Every method may raise DependencyUnavailable and can be retried.
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
        """Save a new version of an agent, or a draft. Save nothing if the newest version is identical.

        Return the newest version and whether it is new. With `validate_only`, nothing is ever saved.

        Raises:
            AgentNotFound: An agent in `delegates_to` does not exist.
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
        """Return one version of an agent. Version 0 means the newest version.

        Raises:
            AgentNotFound: There is no such version. A deleted agent has no newest version.
        """
        request = pb.GetAgentRequest(store_id=store_id, name=name, version=version)
        response = await translated(self._stub.GetAgent(request))
        if not response.HasField("agent"):
            raise AgentNotFound
        return VERSION.read(response.agent)

    async def list(self, caller: Principal, requested: ListAgentsRequest) -> tuple[Sequence[AgentVersion], str]:
        """Return a page of agents (newest versions) or of the caller's drafts, and the next page token.

        Raises:
            InvalidPageToken
        """
        page: dict[str, Any] = {
            "store_id": caller.store_id,
            "page_size": requested.page_size,
            "page_token": requested.page_token,
        }
        response: pb.ListAgentsResponse | pb.ListDraftsResponse
        if requested.drafts:
            response = await translated(self._stub.ListDrafts(pb.ListDraftsRequest(user_id=caller.user_id, **page)))
        else:
            response = await translated(self._stub.ListAgents(pb.ListAgentsRequest(**page)))
        return [*map(VERSION.read, response.agents)], response.next_page_token

    async def model_terms(self, store_id: StoreId, user_id: UserId, name: str) -> ModelTerms:
        request = pb.GetModelTermsRequest(store_id=store_id, user_id=user_id, name=name)
        return _TERMS.read(await translated(self._stub.GetModelTerms(request)))

    async def get_draft(self, store_id: StoreId, user_id: UserId, name: str) -> AgentVersion:
        """Return a user's draft.

        Raises:
            AgentNotFound
        """
        request = pb.GetDraftRequest(store_id=store_id, user_id=user_id, name=name)
        return VERSION.read((await translated(self._stub.GetDraft(request))).agent)


# How outdated a store's `default` agent may be.
DEFAULT_SECONDS_MAX: Final = 5.0
_STORES_KEPT_MAX: Final = 10_000

_log = logs.get_logger(__name__)


class Agents:
    """Creates and finds agents. Agents that the caller may not see or use are reported as not found."""

    def __init__(
        self,
        *,
        ledger: AgentLedger,
        registry: RegistryClient,
        clock: Clock,
        defaults: RunDefaults,
    ) -> None:
        self._ledger = ledger
        self._registry = registry
        self._defaults = defaults
        self._clock = clock
        self._store_defaults: dict[StoreId, tuple[AgentVersion | None, float]] = {}

    async def update(
        self, caller: Principal, definition: AgentDefinition, *, draft: bool, validate_only: bool
    ) -> dict[str, Any]:
        """Save an agent or a draft with the tools that it currently selects. Save nothing if it is unchanged.

        Return the fields of the response.

        Raises:
            InvalidField, InvalidId, TooLarge: The definition is invalid.
            ToolNotFound, AgentNotFound: A tool or agent does not exist, or a draft delegates to an agent that the
                caller may not use.
            InvalidSchema: The response format's schema cannot be used.
            AgentCycle: The agent would delegate to itself, directly or through others.
        """
        definition = (agents.check_draft if draft else agents.check)(definition, self._defaults)
        names, unmatched = await self._select(caller, definition)
        for name in definition.delegates_to if draft else ():
            if name != definition.name and not (await self._newest(caller, name)).may_be_used_with(caller.roles):
                raise AgentNotFound(f"delegates_to: there is no agent {name!r} that you may use", agent=name)
        agent, created = await self._ledger.put(caller, definition, names, draft=draft, validate_only=validate_only)
        if created and not validate_only:
            self._store_defaults.pop(caller.store_id, None)
            _log.info("agent.saved", store=caller.store_id, user=caller.user_id, agent=agent.run_name)
        return {"agent": VERSION.write(agent), "created": created, "unmatched": unmatched}

    async def _select(self, caller: Principal, definition: AgentDefinition) -> agents.Selected:
        form = definition.options.response_format
        if form is not None:
            await self._registry.check_output(caller.store_id, form.schema_json, None)
        needs_tools = not definition.tools.is_open
        return agents.select(definition, await self._registry.offered(caller) if needs_tools else ())

    async def _newest(self, caller: Principal, name: str) -> AgentVersion:
        try:
            return await self._ledger.get_agent(caller.store_id, name, 0)
        except AgentNotFound:
            raise AgentNotFound(f"delegates_to: there is no agent {name!r}: create it first", agent=name) from None

    async def get(self, caller: Principal, name: str, version: int) -> AgentVersion:
        """Return one version of an agent. Version 0 is the newest. A draft's name starts with the draft prefix.

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
        # A caller who may not see the newest version may not see any version.
        newest = await self._find(caller.store_id, name) if version else None
        if not all(each.may_be_seen_with(caller.roles) for each in (found, newest) if each is not None):
            raise AgentNotFound
        return found

    async def list(self, caller: Principal, request: ListAgentsRequest) -> tuple[Sequence[AgentVersion], str]:
        """Return a page of agents (newest versions) or of the caller's drafts, and the next page token.

        The agents are sorted by name. The deployment's `default` comes first if the store does not have its own.

        Raises:
            InvalidPageToken
            InvalidField: A label is invalid.
        """
        wanted = check_labels(request.labels)
        found, token = await self._ledger.list(caller, request)
        if not request.drafts:
            found = [agent for agent in found if agent.may_be_seen_with(caller.roles)]
            if not request.page_token and (await self.get(caller, DEFAULT, 0)).version == 0:
                found = [agents.deployed(self._defaults), *found]
        return [agent for agent in found if has_all(agent.definition.labels, wanted)], token

    async def of_run(self, caller: Principal, name: str) -> AgentVersion | None:
        """Return the agent version for a new run, or None for the deployment's `default`.

        An empty name selects the store's `default`, which may be up to DEFAULT_SECONDS_MAX seconds out of date.

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
        known = self._store_defaults.get(caller.store_id)
        if known is None or known[1] <= now:
            while len(self._store_defaults) >= _STORES_KEPT_MAX:
                self._store_defaults.pop(next(iter(self._store_defaults)))
            known = self._store_defaults[caller.store_id] = (
                await self._find(caller.store_id, DEFAULT),
                now + DEFAULT_SECONDS_MAX,
            )
        return known[0]

    async def _find(self, store_id: StoreId, name: str) -> AgentVersion | None:
        with suppress(AgentNotFound):
            return await self._ledger.get_agent(store_id, name, 0)
        return None
