"""Agents and their versions."""

from __future__ import annotations

from collections.abc import Callable

from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.chassis.process import logs
from pawl.errors import AgentNotFound
from pawl.job_store.agents.rules import AgentVersionRow
from pawl.job_store.agents.store import PostgresAgents
from pawl.job_store.ledger.reading import Page
from pawl.job_store.ledger.rules.usage import Quota
from pawl.job_store.ledger.store.usage import PostgresUsage

_log = logs.get_logger(__name__)


class Agents:
    """The use cases of agents in the ledger. `tokens_max_of` reads the budget of a version, 0 for none."""

    def __init__(
        self, repository: PostgresAgents, usage: PostgresUsage, tokens_max_of: Callable[[AgentVersionRow], int]
    ) -> None:
        self._repository = repository
        self._usage = usage
        self._tokens_max_of = tokens_max_of
        self.usage = usage.of_agent
        self.put = repository.put
        self.list = repository.list
        self.put_draft = repository.put_draft
        self.list_drafts = repository.list_drafts

    async def get(self, store_id: StoreId, name: str, version: int) -> AgentVersionRow:
        """Return a version; 0 is the newest of an agent that is not deleted.

        Raises:
            AgentNotFound
        """
        found = await self._repository.get(store_id, name, version)
        if found is None:
            raise AgentNotFound(f"there is no version {version} of an agent {name}" if version else "")
        return found

    async def newest(self, store_id: StoreId, name: str) -> AgentVersionRow | None:
        """Return the newest version of an agent; None if it is deleted, or there never was one."""
        return await self._repository.get(store_id, name, 0)

    async def quota(self, store_id: StoreId, name: str) -> Quota:
        """Return the budget of an agent that is not deleted, and what is used of it."""
        newest = await self.newest(store_id, name)
        used, day_end_time = await self._usage.today(store_id, name)
        tokens_max = self._tokens_max_of(newest) if newest is not None else 0
        return Quota(tokens_max=tokens_max, tokens_used=used, day_end_time=day_end_time)

    async def versions(self, store_id: StoreId, name: str, *, before: int, rows_max: int) -> Page[AgentVersionRow]:
        """Return versions of an agent, the newest first.

        Raises:
            AgentNotFound: there never was such an agent.
        """
        page = await self._repository.versions(store_id, name, before=before, rows_max=rows_max)
        if not page.rows and await self._repository.get(store_id, name, 1) is None:
            raise AgentNotFound
        return page

    async def delete(self, store_id: StoreId, name: str, user_id: UserId, credential_id: CredentialId) -> None:
        """Mark an agent as deleted.

        Raises:
            AgentNotFound: there is none that was not deleted before.
        """
        if not await self._repository.delete(store_id, name, user_id, credential_id):
            raise AgentNotFound
        _log.info("agent.deleted", store=store_id, user=user_id, agent=name)

    async def get_draft(self, store_id: StoreId, user_id: UserId, name: str) -> AgentVersionRow:
        """Return a draft.

        Raises:
            AgentNotFound
        """
        found = await self._repository.get_draft(store_id, user_id, name)
        if found is None:
            raise AgentNotFound
        return found

    async def delete_draft(self, store_id: StoreId, user_id: UserId, name: str) -> None:
        """Remove a draft.

        Raises:
            AgentNotFound
        """
        if not await self._repository.delete_draft(store_id, user_id, name):
            raise AgentNotFound
