"""Reads the token budgets of stores, users and agents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from pawl.chassis.ids import StoreId, UserId
from pawl.event.v1 import run_pb2
from pawl.job.v1.agents_pb2 import TokenBudget
from pawl.job_store.ledger.ports import LimitsOf
from pawl.job_store.ledger.rpc.messages import timestamp
from pawl.job_store.ledger.store.usage import PostgresTokens
from pawl.server.db.database import Connection
from pawl.values import WaitKind


async def _nothing() -> None: ...


class Budgets:
    """Reads the budgets that `limits_of` and `agent_tokens_max` return. `refresh` updates what `limits_of` returns."""

    def __init__(
        self,
        usage: PostgresTokens,
        limits_of: LimitsOf,
        agent_tokens_max: Callable[[StoreId, str], Awaitable[int]],
        refresh: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        self._usage = usage
        self._limits_of = limits_of
        self._agent_tokens_max = agent_tokens_max
        self.refresh = refresh

    async def limits(self, store_id: StoreId, agent_name: str) -> Mapping[WaitKind, int]:
        """Return the budgets of a store's runs. `agent_name` is empty if the agent has no budget."""
        limits = dict(self._limits_of(store_id).tokens)
        if agent_name and (tokens_max := await self._agent_tokens_max(store_id, agent_name)):
            limits[WaitKind.AGENT_QUOTA] = tokens_max
        return limits

    async def used(
        self,
        limits: Mapping[WaitKind, int],
        store_id: StoreId,
        user_id: UserId,
        agent_name: str,
        connection: Connection | None = None,
    ) -> Sequence[TokenBudget]:
        """Return how much of each budget in `limits` is used. If `connection` is given, read in its transaction."""
        used = dict(await self._usage.tokens(store_id, user_id, connection)) if limits else {}
        if WaitKind.AGENT_QUOTA in limits:
            used[WaitKind.AGENT_QUOTA] = await self._usage.today(store_id, agent_name, connection)
        return [
            TokenBudget(
                kind=run_pb2.WaitKind.ValueType(kind),
                tokens_max=limit,
                tokens_used=used[kind][0],
                end_time=timestamp(used[kind][1]),
            )
            for kind, limit in limits.items()
        ]

    async def of(self, store_id: StoreId, user_id: UserId, agent_name: str) -> Sequence[TokenBudget]:
        found = await self.used(await self.limits(store_id, agent_name), store_id, user_id, agent_name)
        if any(each.tokens_max <= each.tokens_used for each in found):
            # Another replica may have raised the limit.
            await self.refresh()
            found = await self.used(await self.limits(store_id, agent_name), store_id, user_id, agent_name)
        return found
