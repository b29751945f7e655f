"""pawl.job.v1.AgentLedgerService: translates, nothing else."""

from __future__ import annotations

from functools import partial
from typing import Final

from pawl.chassis.ids import DEFAULT_AGENT, check_id
from pawl.chassis.rpc_kinds import Context
from pawl.errors import AgentNotFound
from pawl.event.v1 import agent_pb2
from pawl.job.v1 import agents_pb2 as pb
from pawl.job.v1 import agents_pb2_grpc
from pawl.job_store.app.agents import Agents
from pawl.job_store.app.pages import Id, Small, next_token, page_size, read_token
from pawl.job_store.domain.agents import AgentVersionRow, drafted, saved
from pawl.job_store.domain.usage import DAYS_MAX
from pawl.job_store.rpc.messages import timestamp, used_on_day

_VERSION_MAX: Final = 2**31 - 1


class AgentLedgerServicer(agents_pb2_grpc.AgentLedgerServiceServicer):
    """Serves the versions of agents."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents

    async def PutAgent(self, request: pb.PutAgentRequest, context: Context) -> pb.PutAgentResponse:
        asked = _asked(request)
        delegates_to = tuple(request.definition.delegates_to)
        kept, created = await self._agents.put(
            check_id(request.store_id, "store_id"),
            check_id(request.definition.name, "definition.name"),
            delegates_to,
            lambda agents, newest, now: saved(asked(create_time=now), delegates_to, agents, newest),
            validate_only=request.validate_only,
        )
        return pb.PutAgentResponse(agent=_message(kept), created=created)

    async def GetAgent(self, request: pb.GetAgentRequest, context: Context) -> pb.GetAgentResponse:
        store_id, name = check_id(request.store_id, "store_id"), check_id(request.name, "name")
        if request.version > _VERSION_MAX:
            raise AgentNotFound
        try:
            found = await self._agents.get(store_id, name, request.version)
        except AgentNotFound:
            # Each run that names no agent asks for it, and most stores have none: that is no failure.
            if name != DEFAULT_AGENT or request.version:
                raise
            return pb.GetAgentResponse()
        return pb.GetAgentResponse(agent=_message(found))

    async def ListAgents(self, request: pb.ListAgentsRequest, context: Context) -> pb.ListAgentsResponse:
        store_id = check_id(request.store_id, "store_id")
        after = read_token(request.page_token, "ListAgents", (store_id,), Id) or ""
        page = await self._agents.list(store_id, after=after, rows_max=page_size(request.page_size))
        token = next_token("ListAgents", (store_id,), page, lambda row: row.name)
        return pb.ListAgentsResponse(agents=map(_message, page.rows), next_page_token=token)

    async def ListAgentVersions(
        self, request: pb.ListAgentVersionsRequest, context: Context
    ) -> pb.ListAgentVersionsResponse:
        store_id, name = check_id(request.store_id, "store_id"), check_id(request.name, "name")
        before = read_token(request.page_token, "ListAgentVersions", (store_id, name), Small)
        page = await self._agents.versions(
            store_id, name, before=_VERSION_MAX if before is None else before, rows_max=page_size(request.page_size)
        )
        token = next_token("ListAgentVersions", (store_id, name), page, lambda row: row.version)
        return pb.ListAgentVersionsResponse(agents=map(_message, page.rows), next_page_token=token)

    async def DeleteAgent(self, request: pb.DeleteAgentRequest, context: Context) -> pb.DeleteAgentResponse:
        await self._agents.delete(
            check_id(request.store_id, "store_id"),
            check_id(request.name, "name"),
            check_id(request.user_id, "user_id"),
            check_id(request.credential_id, "credential_id", optional=True),
        )
        return pb.DeleteAgentResponse()

    async def GetAgentUsage(self, request: pb.GetAgentUsageRequest, context: Context) -> pb.GetAgentUsageResponse:
        store_id, name = check_id(request.store_id, "store_id"), check_id(request.name, "name")
        days = min(request.days, DAYS_MAX)
        found = await self._agents.usage(store_id, name, days=days)
        return pb.GetAgentUsageResponse(days=map(used_on_day, found))

    async def GetAgentQuota(self, request: pb.GetAgentQuotaRequest, context: Context) -> pb.GetAgentQuotaResponse:
        store_id, name = check_id(request.store_id, "store_id"), check_id(request.name, "name")
        found = await self._agents.quota(store_id, name)
        return pb.GetAgentQuotaResponse(
            tokens_max=found.tokens_max, tokens_used=found.tokens_used, day_end_time=timestamp(found.day_end_time)
        )

    async def PutDraft(self, request: pb.PutDraftRequest, context: Context) -> pb.PutDraftResponse:
        asked = _asked(request)
        delegates_to = tuple(request.definition.delegates_to)
        kept, created = await self._agents.put_draft(
            check_id(request.store_id, "store_id"),
            check_id(request.user_id, "user_id"),
            lambda agents, drafts, now: drafted(asked(create_time=now), delegates_to, agents, drafts),
            validate_only=request.validate_only,
        )
        return pb.PutDraftResponse(agent=_draft(kept), created=created)

    async def GetDraft(self, request: pb.GetDraftRequest, context: Context) -> pb.GetDraftResponse:
        store_id, user_id = check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id")
        found = await self._agents.get_draft(store_id, user_id, check_id(request.name, "name"))
        return pb.GetDraftResponse(agent=_draft(found))

    async def ListDrafts(self, request: pb.ListDraftsRequest, context: Context) -> pb.ListDraftsResponse:
        store_id, user_id = check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id")
        after = read_token(request.page_token, "ListDrafts", (store_id, user_id), Id) or ""
        page = await self._agents.list_drafts(store_id, user_id, after=after, rows_max=page_size(request.page_size))
        token = next_token("ListDrafts", (store_id, user_id), page, lambda row: row.name)
        return pb.ListDraftsResponse(agents=map(_draft, page.rows), next_page_token=token)

    async def DeleteDraft(self, request: pb.DeleteDraftRequest, context: Context) -> pb.DeleteDraftResponse:
        store_id, user_id = check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id")
        await self._agents.delete_draft(store_id, user_id, check_id(request.name, "name"))
        return pb.DeleteDraftResponse()


def _asked(request: pb.PutAgentRequest | pb.PutDraftRequest) -> partial[AgentVersionRow]:
    """Return a version as it is asked for, which lacks its time."""
    return partial(
        AgentVersionRow,
        store_id=check_id(request.store_id, "store_id"),
        name=check_id(request.definition.name, "definition.name"),
        definition=request.definition.SerializeToString(deterministic=True),
        tool_names=tuple(sorted(set(request.tool_names))),
        create_user_id=check_id(request.user_id, "user_id"),
        create_credential_id=check_id(request.credential_id, "credential_id", optional=True),
    )


def daily_tokens_max(row: AgentVersionRow) -> int:
    """Return the tokens that all runs of an agent may use in a day; 0 for any number."""
    return agent_pb2.AgentDefinition.FromString(row.definition).daily_tokens_max


def _draft(row: AgentVersionRow) -> agent_pb2.AgentVersion:
    message = _message(row)
    message.draft = True
    return message


def _message(row: AgentVersionRow) -> agent_pb2.AgentVersion:
    return agent_pb2.AgentVersion(
        definition=agent_pb2.AgentDefinition.FromString(row.definition),
        version=row.version,
        tool_names=row.tool_names,
        create_time=timestamp(row.create_time),
        create_user_id=row.create_user_id,
    )
