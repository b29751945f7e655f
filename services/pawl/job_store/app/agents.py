"""Agents and their versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Protocol, TypeAlias

from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.errors import AgentNotFound
from pawl.job_store.app.reading import Page
from pawl.job_store.domain.agents import AgentRow, AgentVersionRow
from pawl.job_store.domain.usage import Quota, UsedOnDay

Save: TypeAlias = Callable[[Mapping[str, AgentRow], AgentVersionRow | None, datetime], AgentVersionRow]
"""The newest version of an agent, from all agents of its store by name, its newest version so far, and the time."""

SaveDraft: TypeAlias = Callable[[Mapping[str, AgentRow], Mapping[str, AgentVersionRow], datetime], AgentVersionRow]
"""A draft of a user, from all agents of its store by name, all drafts of the user by name, and the time."""


class AgentRepository(Protocol):
    """Keeps versions of agents, and drafts. Changes in a store come one after the other."""

    async def put(
        self, store_id: StoreId, name: str, delegates_to: tuple[str, ...], save: Save, *, validate_only: bool
    ) -> tuple[AgentVersionRow, bool]:
        """Keep what `save` returns, if that is new; returns it, and whether it is. `validate_only` keeps nothing.

        Raises:
            PawlError: what `save` raises.
        """

    async def get(self, store_id: StoreId, name: str, version: int) -> AgentVersionRow | None:
        """Return a version; 0 is the newest of an agent that is not deleted."""

    async def list(self, store_id: StoreId, *, after: str, rows_max: int) -> Page[AgentVersionRow]:
        """Return the newest versions of agents that are not deleted, by name, from the one after `after` on."""

    async def versions(self, store_id: StoreId, name: str, *, before: int, rows_max: int) -> Page[AgentVersionRow]:
        """Return versions of an agent, the newest first, from the one before `before` on."""

    async def delete(self, store_id: StoreId, name: str, user_id: UserId, credential_id: CredentialId) -> bool:
        """Mark an agent as deleted; whether there was one that was not."""

    async def put_draft(
        self, store_id: StoreId, user_id: UserId, save: SaveDraft, *, validate_only: bool
    ) -> tuple[AgentVersionRow, bool]:
        """Keep the draft that `save` returns, if that is new; as `put`."""

    async def get_draft(self, store_id: StoreId, user_id: UserId, name: str) -> AgentVersionRow | None:
        """Return a draft."""

    async def list_drafts(
        self, store_id: StoreId, user_id: UserId, *, after: str, rows_max: int
    ) -> Page[AgentVersionRow]:
        """Return the drafts of a user, by name, from the one after `after` on."""

    async def delete_draft(self, store_id: StoreId, user_id: UserId, name: str) -> bool:
        """Remove a draft; whether there was one."""


class UsageReads(Protocol):
    """Reads what was used."""

    async def of_agent(self, store_id: StoreId, name: str, *, days: int) -> Sequence[UsedOnDay]:
        """Return the use of an agent on each of the last days on which there was any, the newest first."""

    async def today(self, store_id: StoreId, name: str) -> tuple[int, datetime]:
        """Return the tokens that an agent has used today, and when the day ends."""
        ...


class Agents:
    """The use cases of agents in the ledger. `tokens_max_of` reads the budget of a version, 0 for none."""

    def __init__(
        self, repository: AgentRepository, usage: UsageReads, tokens_max_of: Callable[[AgentVersionRow], int]
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
            raise AgentNotFound
        return found

    async def quota(self, store_id: StoreId, name: str) -> Quota:
        """Return the budget of an agent that is not deleted, and what is used of it."""
        newest = await self._repository.get(store_id, name, 0)
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
