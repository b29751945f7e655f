"""Tools with observable effects, and registry processes that die during calls."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import psutil

from pawl.chassis.ids import CallId, CallKey, RunId, StoreId
from pawl.server.db.database import Database
from pawl.tool_registry.execution.store.journal import PostgresExecutionJournal
from pawl.tool_registry.rules.journal import Begun, JournalCall
from pawl.tool_registry.rules.verdict import call_digest
from pawl.tools import Category, ReconcileResult, Tool, ToolContext, cannot_say, tool
from pawl.values import EffectClass
from tests.rpc.tool_registry.registry import Registry


@dataclass
class World:
    effects: list[str] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    finding: ReconcileResult = field(default_factory=cannot_say)

    def tools(self) -> list[Tool[..., Any]]:
        async def reconcile(context: ToolContext) -> ReconcileResult:
            self.effects.append(f"asked about {context.call_id}")
            return self.finding

        @tool(category=Category.SAFE)
        async def pay(context: ToolContext, amount: int = 1, wait: bool = False) -> str:
            """Pay."""
            return await self.act(f"paid {amount}", wait=wait)

        @tool(category=Category.SAFE, effect=EffectClass.RECONCILABLE, reconcile=reconcile)
        async def order(context: ToolContext, wait: bool = False) -> str:
            """Order."""
            return await self.act("ordered", wait=wait)

        @tool(category=Category.DESTRUCTIVE)
        async def delete(path: str) -> str:
            """Delete."""
            return await self.act(f"deleted {path}", wait=False)

        return [pay, order, delete]

    async def act(self, effect: str, *, wait: bool) -> str:
        self.begun.set()
        if wait:
            await self.release.wait()
        self.effects.append(effect)
        return effect


def bills(*, changed: bool = False) -> list[Tool[..., Any]]:
    """Return tools of several categories. With `changed`, `pay` has another description."""

    @tool(description="Pay a bill now." if changed else "Pay a bill.")
    async def pay(amount: int = 1, to: str = "ann", items: list[str] | None = None) -> str:
        return f"paid {amount}"

    @tool(category=Category.DESTRUCTIVE)
    async def erase() -> str:
        """Erase everything."""
        return "erased"

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def look() -> str:
        """Look."""
        return "seen"

    @tool(category=Category.DESTRUCTIVE, effect=EffectClass.IDEMPOTENT, grants=True)
    async def rotate() -> str:
        """Delete the oldest log."""
        return "deleted"

    return [pay, erase, look, rotate]


async def execute(database_url: str, sql: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


@asynccontextmanager
async def dead_process(database_url: str, registry: Registry, tool_name: str, call: str) -> AsyncIterator[None]:
    effect = EffectClass.RECONCILABLE if tool_name == "order" else EffectClass.AT_MOST_ONCE
    async with Database(database_url, application_name="dead") as database:
        journal = PostgresExecutionJournal(database, instance_id="dead", lease_seconds=60)
        await journal.renew()
        begun = await journal.begin(
            JournalCall(
                key=CallKey(StoreId("acme"), CallId(call)),
                run_id=RunId("run"),
                tool_name=tool_name,
                tool_version=1,
                effect=effect,
                fingerprint=await fingerprint(registry, tool_name, call),
                unknowns_resolved=0,
                token="dead",
                is_askable=True,
            )
        )
        assert begun == Begun()
        await database_is_told(database_url, alive=False)
        yield


async def fingerprint(registry: Registry, tool_name: str, call: str) -> str:
    arguments = (await registry.check(tool_name, call=call)).arguments_json
    return call_digest(
        store_id=StoreId("acme"),
        run_id=RunId("run"),
        call_id=CallId(call),
        tool_name=tool_name,
        tool_version=1,
        arguments=arguments,
    )


async def database_is_told(database_url: str, *, alive: bool) -> None:
    interval = "1 hour" if alive else "-1 second"
    await execute(
        database_url,
        f"UPDATE tool_registry.instances SET expires_at = now() + interval '{interval}' WHERE instance_id = 'dead'",  # noqa: S608
    )


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def digest_of(database_url: str, content: bytes, key_id: str = "conversation") -> str:
    async with Database(database_url, application_name="test") as database:
        secret = await database.fetchval("SELECT secret FROM tool_registry.audit_keys WHERE key_id = $1", key_id)
    return hmac.digest(secret, hashlib.sha256(content).hexdigest().encode(), "sha256").hex()
