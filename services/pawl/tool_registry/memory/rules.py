"""Memories: facts that an agent stores about a user across conversations."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from pawl.chassis.ids import StoreId, UserId

TEXT_CHARACTERS_MAX: Final = 1000
# Per agent and user.
MEMORIES_MAX: Final = 500
# Per user, across all agents.
USER_MEMORIES_MAX: Final = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOwner:
    """An agent, and the user whom the agent's memories are about. An empty agent name means all agents."""

    store_id: StoreId
    user_id: UserId
    agent_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    memory_id: str
    agent_name: str
    text: str
    create_time: float


def memory_id_of(call_id: str) -> str:
    """Return the id of the memory that a call creates. A repeated call results in the same id."""
    return f"mem_{hashlib.sha256(call_id.encode()).hexdigest()[:24]}"
