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

    async def used_up(
        self, run: Run, tokens: int, now: float, read: Callable[[StoreId, str], Awaitable[AgentQuota]]
    ) -> AgentQuota | None:
        """Return the budget of the agent of a run if it is used up.

        `tokens` are those that the run has used since it was here last, `now` is by a monotonic clock. A draft has no
        budget, nor has the default of the deployment.
        """
        if run.agent is None or draft_name(run.agent.name):
            return None
        key = run.store_id, run.agent.name
        room = self._rooms.pop(key, _Room(0, now))
        room = room._replace(tokens=room.tokens - tokens)
        if room.tokens <= 0 or room.until <= now:
            quota = await read(*key)
            if quota.is_used_up:
                return quota
            room = _Room(math.inf, now + NONE_SECONDS_MAX)
            if quota.tokens_max:
                room = _Room(quota.tokens_max * 9 // 10 - quota.tokens_used, now + ENOUGH_SECONDS_MAX)
        while len(self._rooms) >= _AGENTS_KEPT_MAX:
            self._rooms.pop(next(iter(self._rooms)))
        self._rooms[key] = room
        return None
