"""Memories, for the users whom they are about; agents reach them by their tools, through the repository."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pawl.chassis.auth import Principal
from pawl.tool_registry.domain.memory import Memory, MemoryOwner


class MemoryRepository(Protocol):
    """Memories of agents about users, durable."""

    async def add(self, owner: MemoryOwner, memory_id: str, text: str) -> Memory:
        """Keep a text; returns the memory that has it, which may be an older one. Atomic, idempotent by its id.

        Raises:
            TooLarge: the agent, or the user, has too many.
        """

    async def search(self, owner: MemoryOwner, query: str, most: int) -> Sequence[Memory]:
        """Return those that match, the best first; for an empty query the newest.

        The query is in the form of search engines: words, "phrases", or, -without.
        """

    async def after(self, owner: MemoryOwner, place: tuple[str, float, str], most: int) -> Sequence[Memory]:
        """Return memories by agent, time and id, from the one after that place on."""

    async def delete(self, owner: MemoryOwner, memory_id: str = "") -> int:
        """Remove a memory, or all of the owner if none is named; returns how many there were."""


class Memories:
    """The use cases of users with memories."""

    def __init__(self, repository: MemoryRepository) -> None:
        self._repository = repository

    async def page(
        self, caller: Principal, agent_name: str, *, after: tuple[str, float, str], most: int
    ) -> Sequence[Memory]:
        """Return memories about the caller, by agent, the oldest first."""
        return await self._repository.after(_owner(caller, agent_name), after, most)

    async def erase(self, caller: Principal, agent_name: str, memory_id: str) -> int:
        """Remove memories about the caller; returns how many there were."""
        return await self._repository.delete(_owner(caller, agent_name), memory_id)


def _owner(caller: Principal, agent_name: str) -> MemoryOwner:
    return MemoryOwner(store_id=caller.store_id, user_id=caller.user_id, agent_name=agent_name)
