"""Servicers for pawl.agent.v1.AgentRegistryService (forwarded by agent-loop) and pawl.job.v1.AgentLedgerService."""

from __future__ import annotations

from functools import partial

from pawl.agent.v1 import agents_pb2 as pb
from pawl.chassis.identity.auth import Principal, require_decider, require_user
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import DEFAULT_AGENT, StoreId, check_id
from pawl.chassis.process import logs
from pawl.chassis.rpc.kinds import Context
from pawl.errors import AgentNotFound, ModelNotAllowed
from pawl.event.v1 import agent_pb2
from pawl.job.v1 import agents_pb2 as ledger
from pawl.job.v1 import agents_pb2_grpc
from pawl.job_store.agents.rules import AGENT, drafted
from pawl.job_store.agents.store import PostgresAgents
from pawl.job_store.ledger.pages import Id, next_token, page_size, read_token
from pawl.job_store.ledger.ports import LimitsOf
from pawl.job_store.ledger.rpc.budgets import Budgets
from pawl.job_store.versions.rpc import VERSION_MAX, message_of, versions_for
from pawl.job_store.versions.rules import VersionRow, saved

_log = logs.get_logger(__name__)


class AgentServicer:
    def __init__(self, agents: PostgresAgents) -> None:
        self._agents = agents

    async def ListAgentVersions(
        self, request: pb.ListAgentVersionsRequest, context: Context
    ) -> pb.ListAgentVersionsResponse:
        user = require_user()
        shown, token = await versions_for(
            user,
            self._agents,
            request,
            method="ListAgentVersions",
            read=partial(_seen, user),
            not_found=AgentNotFound,
        )
        return pb.ListAgentVersionsResponse(agents=shown, next_page_token=token)

    async def DeleteAgent(self, request: pb.DeleteAgentRequest, context: Context) -> pb.DeleteAgentResponse:
        user, name = require_decider(), check_id(request.name, "name")
        if not await self._agents.delete(user.store_id, name, user.user_id, user.credential_id):
            raise AgentNotFound
        _log.info("agent.deleted", store=user.store_id, user=user.user_id, agent=name)
        return pb.DeleteAgentResponse()

    async def DeleteDraft(self, request: pb.DeleteDraftRequest, context: Context) -> pb.DeleteDraftResponse:
        user = require_user()
        if not await self._agents.delete_draft(user.store_id, user.user_id, check_id(request.name, "name")):
            raise AgentNotFound
        return pb.DeleteDraftResponse()


class AgentLedgerServicer(agents_pb2_grpc.AgentLedgerServiceServicer):
    def __init__(self, agents: PostgresAgents, budgets: Budgets, limits_of: LimitsOf) -> None:
        self._agents = agents
        self._budgets = budgets
        self._limits_of = limits_of

    async def PutAgent(self, request: ledger.PutAgentRequest, context: Context) -> ledger.PutAgentResponse:
        requested = self._allowed(request)
        delegates_to = tuple(request.definition.delegates_to)
        stored, created = await self._agents.put(
            check_id(request.store_id, "store_id"),
            check_id(request.definition.name, "definition.name"),
            delegates_to,
            lambda agents, newest, now: saved(AGENT, requested(create_time=now), delegates_to, agents, newest),
            validate_only=request.validate_only,
        )
        return ledger.PutAgentResponse(agent=_message(stored), created=created)

    async def GetAgent(self, request: ledger.GetAgentRequest, context: Context) -> ledger.GetAgentResponse:
        store_id, name = check_id(request.store_id, "store_id"), check_id(request.name, "name")
        if request.version > VERSION_MAX:
            raise AgentNotFound
        found = await self._agents.get(store_id, name, request.version)
        # Runs that do not specify an agent request the default agent. Most stores have none, which is not an error.
        if found is None and (name != DEFAULT_AGENT or request.version):
            raise AgentNotFound
        return ledger.GetAgentResponse(agent=None if found is None else _message(found))

    async def ListAgents(self, request: ledger.ListAgentsRequest, context: Context) -> ledger.ListAgentsResponse:
        store_id = check_id(request.store_id, "store_id")
        after = read_token(request.page_token, "ListAgents", (store_id,), Id) or ""
        page = await self._agents.list(store_id, after=after, rows_max=page_size(request.page_size))
        token = next_token("ListAgents", (store_id,), page, lambda row: row.name)
        return ledger.ListAgentsResponse(agents=map(_message, page.rows), next_page_token=token)

    async def GetModelTerms(
        self, request: ledger.GetModelTermsRequest, context: Context
    ) -> ledger.GetModelTermsResponse:
        store_id, user_id = check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id")
        found = await self._budgets.of(store_id, user_id, check_id(request.name, "name", optional=True))
        limits = self._limits_of(store_id)
        return ledger.GetModelTermsResponse(
            budgets=found,
            models=sorted(limits.models),
            model_server=limits.model_server,
            is_rated=bool(limits.model_requests_per_minute or limits.model_tokens_per_minute),
        )

    async def PutDraft(self, request: ledger.PutDraftRequest, context: Context) -> ledger.PutDraftResponse:
        requested = self._allowed(request)
        delegates_to = tuple(request.definition.delegates_to)
        stored, created = await self._agents.put_draft(
            check_id(request.store_id, "store_id"),
            check_id(request.user_id, "user_id"),
            lambda agents, drafts, now: drafted(requested(create_time=now), delegates_to, agents, drafts),
            validate_only=request.validate_only,
        )
        return ledger.PutDraftResponse(agent=_draft(stored), created=created)

    async def GetDraft(self, request: ledger.GetDraftRequest, context: Context) -> ledger.GetDraftResponse:
        store_id, user_id = check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id")
        found = await self._agents.get_draft(store_id, user_id, check_id(request.name, "name"))
        if found is None:
            raise AgentNotFound
        return ledger.GetDraftResponse(agent=_draft(found))

    async def ListDrafts(self, request: ledger.ListDraftsRequest, context: Context) -> ledger.ListDraftsResponse:
        store_id, user_id = check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id")
        after = read_token(request.page_token, "ListDrafts", (store_id, user_id), Id) or ""
        page = await self._agents.list_drafts(store_id, user_id, after=after, rows_max=page_size(request.page_size))
        token = next_token("ListDrafts", (store_id, user_id), page, lambda row: row.name)
        return ledger.ListDraftsResponse(agents=map(_draft, page.rows), next_page_token=token)

    def _allowed(self, request: ledger.PutAgentRequest | ledger.PutDraftRequest) -> partial[VersionRow]:
        options = request.definition.options
        limits = self._limits_of(StoreId(check_id(request.store_id, "store_id")))
        if refused := limits.refused_model((options.model, *options.model_fallbacks)):
            raise ModelNotAllowed(f"this store may not use the model {refused!r}", model=refused)
        return _asked(request)


async def daily_tokens_max(agents: PostgresAgents, store_id: StoreId, name: str) -> int:
    """Return the daily token budget of an agent; 0 if it has none."""
    newest = await agents.get(store_id, name, 0)
    return 0 if newest is None else _message(newest).definition.daily_tokens_max


def _asked(request: ledger.PutAgentRequest | ledger.PutDraftRequest) -> partial[VersionRow]:
    agent = agent_pb2.AgentVersion(definition=request.definition, tool_names=sorted(set(request.tool_names)))
    return partial(
        VersionRow,
        store_id=check_id(request.store_id, "store_id"),
        name=check_id(request.definition.name, "definition.name"),
        content=agent.SerializeToString(deterministic=True),
        create_user_id=check_id(request.user_id, "user_id"),
        create_credential_id=check_id(request.credential_id, "credential_id", optional=True),
    )


def _seen(user: Principal, row: VersionRow) -> agent_pb2.AgentVersion | None:
    agent = _message(row)
    allowed = agent.definition.allowed_roles
    is_shown = not allowed or Role.ADMIN in user.roles or not user.roles.isdisjoint(allowed)
    return agent if is_shown else None


def _draft(row: VersionRow) -> agent_pb2.AgentVersion:
    message = _message(row)
    message.draft = True
    return message


def _message(row: VersionRow) -> agent_pb2.AgentVersion:
    return message_of(row, agent_pb2.AgentVersion)
