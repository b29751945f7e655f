"""Memories: facts that an agent keeps about a user beyond a conversation."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from pawl.chassis.ids import StoreId, UserId

TEXT_CHARACTERS_MAX: Final = 1000
MEMORIES_MAX: Final = 500
"""Of an agent about a user."""
USER_MEMORIES_MAX: Final = 5000
"""About a user, of all agents together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOwner:
    """The owner of memories: an agent, and the user whom they are about. An empty agent stands for all of them."""

    store_id: StoreId
    user_id: UserId
    agent_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A memory. `create_time` is in seconds since 1970."""

    memory_id: str
    agent_name: str
    text: str
    create_time: float


def memory_id_of(call_id: str) -> str:
    """Return the id of what a call remembers: a call that is run again remembers nothing twice."""
    return f"mem_{hashlib.sha256(call_id.encode()).hexdigest()[:24]}"
