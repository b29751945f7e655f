"""The budgets of agents, as a worker asks for them before each model call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from pawl.agent_loop.domain.agents import AgentQuota, draft_name
from pawl.agent_loop.domain.run import Run
from pawl.chassis.ids import StoreId
from pawl.errors import MethodNotFound

NONE_SECONDS_MAX: Final = 5.0
"""So long a budget that an agent did not have may not hold yet."""
_AGENTS_KEPT_MAX: Final = 10_000


class AgentQuotas:
    """Remembers for a moment which agents have no budget, so that their model calls wait for nothing."""

    def __init__(self) -> None:
        self._none_until: dict[tuple[StoreId, str], float] = {}

    def may_have_one(self, run: Run, now: float) -> bool:
        """Return whether to ask, by a monotonic clock. A draft has none, nor has the default of the deployment."""
        if run.agent is None or draft_name(run.agent.name):
            return False
        return self._none_until.get((run.store_id, run.agent.name), now) <= now

    async def read(self, run: Run, read: Callable[[StoreId, str], Awaitable[AgentQuota]], now: float) -> AgentQuota:
        """Return the budget of the agent of a run, and what is used of it."""
        key = run.store_id, run.agent.name if run.agent else ""
        try:
            quota = await read(*key)
        except MethodNotFound:
            # A ledger of the version before knows no budgets.
            quota = AgentQuota()
        self._none_until.pop(key, None)
        if not quota.tokens_max:
            while len(self._none_until) >= _AGENTS_KEPT_MAX:
                self._none_until.pop(next(iter(self._none_until)))
            self._none_until[key] = now + NONE_SECONDS_MAX
        return quota
