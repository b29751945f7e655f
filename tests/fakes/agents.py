"""Agents in the in-memory ledger, with the real rules and servicer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from pawl.agent_loop.agents.agents import AgentLedger
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.event.v1.agent_pb2 import AgentUsage
from pawl.job_store.agents.rpc import AgentLedgerServicer, AgentServicer
from pawl.job_store.agents.rules import AgentRow, AgentVersionRow, Save, SaveDraft
from pawl.job_store.agents.store import PostgresAgents
from pawl.job_store.ledger.reading import Page
from pawl.job_store.ledger.store.upkeep import PostgresUsage
from tests.simulation.job_store import Channel, answer

TIME = datetime(2026, 1, 1, tzinfo=UTC)


class MemoryAgentRepository(PostgresAgents):
    def __init__(self) -> None:
        self.agents: dict[tuple[StoreId, str], AgentRow] = {}
        self.rows: dict[tuple[StoreId, str, int], AgentVersionRow] = {}
        self.drafts: dict[tuple[StoreId, UserId], dict[str, AgentVersionRow]] = {}

    async def put(
        self, store_id: StoreId, name: str, delegates_to: tuple[str, ...], save: Save, *, validate_only: bool
    ) -> tuple[AgentVersionRow, bool]:
        agents = {key[1]: agent for key, agent in self.agents.items() if key[0] == store_id}
        newest = self.rows[store_id, name, agents[name].version] if name in agents else None
        kept = save(agents, newest, TIME)
        if kept is newest:
            return kept, False
        if not validate_only:
            self.rows[store_id, name, kept.version] = kept
            self.agents[store_id, name] = AgentRow(name=name, version=kept.version, delegates_to=delegates_to)
        return kept, True

    async def get(self, store_id: StoreId, name: str, version: int) -> AgentVersionRow | None:
        agent = self.agents.get((store_id, name))
        if not version and (agent is None or agent.is_deleted):
            return None
        return self.rows.get((store_id, name, version or (agent.version if agent else 0)))

    async def list(self, store_id: StoreId, *, after: str, rows_max: int) -> Page[AgentVersionRow]:
        live = sorted(
            agent.name
            for (store, name), agent in self.agents.items()
            if store == store_id and name > after and not agent.is_deleted
        )
        rows = [self.rows[store_id, name, self.agents[store_id, name].version] for name in live]
        return Page(rows=rows[:rows_max], has_more=len(rows) > rows_max)

    async def versions(self, store_id: StoreId, name: str, *, before: int, rows_max: int) -> Page[AgentVersionRow]:
        found = [row for key, row in self.rows.items() if key[:2] == (store_id, name) and row.version < before]
        found.sort(key=lambda row: -row.version)
        return Page(rows=found[:rows_max], has_more=len(found) > rows_max)

    async def delete(self, store_id: StoreId, name: str, user_id: UserId, credential_id: CredentialId) -> bool:
        agent = self.agents.get((store_id, name))
        if agent is None or agent.is_deleted:
            return False
        self.agents[store_id, name] = replace(agent, is_deleted=True)
        return True

    async def put_draft(
        self, store_id: StoreId, user_id: UserId, save: SaveDraft, *, validate_only: bool
    ) -> tuple[AgentVersionRow, bool]:
        drafts = self.drafts.setdefault((store_id, user_id), {})
        kept = save({key[1]: agent for key, agent in self.agents.items() if key[0] == store_id}, drafts, TIME)
        if kept is drafts.get(kept.name):
            return kept, False
        if not validate_only:
            drafts[kept.name] = kept
        return kept, True

    async def get_draft(self, store_id: StoreId, user_id: UserId, name: str) -> AgentVersionRow | None:
        return self.drafts.get((store_id, user_id), {}).get(name)

    async def list_drafts(
        self, store_id: StoreId, user_id: UserId, *, after: str, rows_max: int
    ) -> Page[AgentVersionRow]:
        drafts = self.drafts.get((store_id, user_id), {})
        rows = [drafts[name] for name in sorted(drafts) if name > after]
        return Page(rows=rows[:rows_max], has_more=len(rows) > rows_max)

    async def delete_draft(self, store_id: StoreId, user_id: UserId, name: str) -> bool:
        return self.drafts.get((store_id, user_id), {}).pop(name, None) is not None


class MemoryUsage(PostgresUsage):
    def __init__(self) -> None:
        self.of_agents: dict[tuple[StoreId, str], list[AgentUsage]] = {}
        self.tokens_today: dict[tuple[StoreId, str], int] = {}
        self.day_end_time = TIME

    async def of_agent(self, store_id: StoreId, name: str, *, days: int) -> Sequence[AgentUsage]:
        return self.of_agents.get((store_id, name), [])[:days]

    async def today(self, store_id: StoreId, name: str) -> tuple[int, datetime]:
        return self.tokens_today.get((store_id, name), 0), self.day_end_time


class MemoryAgents(AgentLedger):
    def __init__(self) -> None:
        self.repository = MemoryAgentRepository()
        self.usage = MemoryUsage()
        # Handles forwarded calls
        self.forwarded = AgentServicer(self.repository, self.usage)
        servicer = AgentLedgerServicer(self.repository, self.usage)
        channel: Any = Channel(lambda method, request, _: answer([servicer], method, request))
        super().__init__(channel)
