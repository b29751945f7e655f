"""The budgets of agents, as a worker asks for them before each model call."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from pawl.agent_loop.agents.rules import AgentQuota, draft_name
from pawl.agent_loop.loop.rules.run import Run
from pawl.chassis.ids import StoreId

NONE_SECONDS_MAX: Final = 5.0
"""So long a budget that an agent did not have may not hold yet."""
ENOUGH_SECONDS_MAX: Final = 1.0
"""So long what others use of a budget may not be seen yet, while less than 90 % of it is used."""
_AGENTS_KEPT_MAX: Final = 10_000


class _Room(NamedTuple):
    """The tokens that the runs of an agent may use without another look, and how long."""

    tokens: float
    until: float


class AgentQuotas:
    """Remembers for a moment which agents have no budget, or enough left: their model calls wait for nothing."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[StoreId, str], _Room] = {}

    def must_be_read(self, run: Run, tokens: int, now: float) -> bool:
        """Return whether to ask, by a monotonic clock, once a run has used so many tokens since it was here last.

        A draft has no budget, nor has the default of the deployment.
        """
        if run.agent is None or draft_name(run.agent.name):
            return False
        key = run.store_id, run.agent.name
        room = self._rooms.get(key)
        if room is None:
            return True
        left = self._rooms[key] = room._replace(tokens=room.tokens - tokens)
        return left.tokens <= 0 or left.until <= now

    async def read(self, run: Run, read: Callable[[StoreId, str], Awaitable[AgentQuota]], now: float) -> AgentQuota:
        """Return the budget of the agent of a run, and what is used of it."""
        key = run.store_id, run.agent.name if run.agent else ""
        quota = await read(*key)
        self._rooms.pop(key, None)
        room = _Room(math.inf, now + NONE_SECONDS_MAX)
        if quota.tokens_max:
            room = _Room(quota.tokens_max * 9 // 10 - quota.tokens_used, now + ENOUGH_SECONDS_MAX)
        if room.tokens > 0:
            while len(self._rooms) >= _AGENTS_KEPT_MAX:
                self._rooms.pop(next(iter(self._rooms)))
            self._rooms[key] = room
        return quota
