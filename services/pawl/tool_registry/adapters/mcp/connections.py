"""The connections of all sources: opened when they are needed, shared as `Pool` says, and kept for the next calls."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2

from pawl.chassis import tasks
from pawl.chassis.clock import Clock
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import SourceUnreachable
from pawl.tool.v1.source_pb2 import McpHttpConfig, McpStdioConfig
from pawl.tool_registry.adapters.mcp.config import McpServer, read_config, secrets_of
from pawl.tool_registry.adapters.mcp.permission import Programs
from pawl.tool_registry.adapters.mcp.pool import Pool, crowd
from pawl.tool_registry.adapters.mcp.program import Program
from pawl.tool_registry.adapters.secret_file import FileSecrets
from pawl.tool_registry.domain.source import Source

if TYPE_CHECKING:
    from pawl.tool_registry.adapters.mcp.call import Flight
    from pawl.tool_registry.adapters.mcp.session import Session
    from pawl.tool_registry.adapters.mcp.transports import Streams, Wire

HttpClients = Callable[[StoreId], httpx2.AsyncClient]
"""Store to a fresh client that reaches what the store's tools may reach."""


class Connections:
    """Connections with MCP servers.

    One is closed when it is idle for `idle_seconds`, when its source changes, and at
    the end. One that opens goes on opening when the call that needed it has run out
    of time. After a crash a server is started again, at once the first time, then
    with growing pauses.
    """

    def __init__(
        self, *, secrets: FileSecrets, clock: Clock, http: HttpClients, programs: Programs, idle_seconds: float
    ) -> None:
        self._secrets = secrets
        self._clock = clock
        self._http = http
        self._programs = programs
        self._idle_seconds = idle_seconds
        self._pools: dict[tuple[StoreId, str], Pool] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End them all."""
        pools, self._pools = self._pools, {}
        self._close([session for pool in pools.values() for session in pool.sessions])
        await asyncio.gather(*self._closing)

    async def forget(self, store_id: StoreId, name: str) -> None:
        """End those of a source, and what is known of its crashes."""
        pool = self._pools.pop((store_id, name), None)
        if pool is not None:
            await asyncio.gather(*(session.close() for session in pool.sessions))

    def recover(self, source: Source) -> None:
        """End the back-off of a source, because it has just answered."""
        self._pools[source.store_id, source.name].recover(self._clock.monotonic())

    @asynccontextmanager
    async def place(
        self, source: Source, user_id: UserId, call_id: str, *, is_forced: bool = False, is_alone: bool = False
    ) -> AsyncGenerator[tuple[Session, Flight], None]:
        """Hold a place on an open connection of a source; a new one goes on opening when nobody waits for it any more.

        With `is_alone` no other call uses it meanwhile.

        Raises:
            InvalidField: the configuration cannot be used.
            SourceUnreachable: it does not answer, or was asked in vain too lately; `is_forced` asks all the same.
        """
        server = read_config(source.config)
        if isinstance(server, McpStdioConfig):
            self._programs.check(source.store_id, server)
        values = self._secret_values(source, server)
        await load()
        session = self._session(source, server, values, user_id, call_id, is_forced=is_forced, is_alone=is_alone)
        flight = session.take_place(user_id, call_id)
        try:
            await session.opened()
            yield session, flight
        finally:
            session.leave(flight)

    def _session(
        self,
        source: Source,
        server: McpServer,
        values: Mapping[str, str],
        user_id: UserId,
        call_id: str,
        *,
        is_forced: bool,
        is_alone: bool,
    ) -> Session:
        """Return a connection that may carry a call, or begin a new one."""
        pool = self._pools.setdefault((source.store_id, source.name), Pool())
        self._close(pool.renew((source.config, tuple(sorted(values.items())))))
        now = self._clock.monotonic()
        session = pool.find(user_id, call_id, now, is_alone=is_alone)
        if session is not None:
            return session
        wait = pool.not_before - now
        if wait > 0 and not is_forced:
            raise SourceUnreachable(f"{pool.problem}; it is tried again in {wait:.0f} s")
        self._close(pool.spent(user_id))
        owner = None if server.stateless and not (pool.is_asking or is_alone) else user_id
        self._make_room(source.store_id, owner)
        begun: Session = late("session").Session(
            self._transport(source, server, values),
            name=f"{source.store_id}/{source.name}",
            owner=owner,
            secrets=frozenset(values.values()),
            clock=self._clock,
            idle_seconds=self._idle_seconds,
        )
        pool.sessions.append(begun)
        return begun

    def _make_room(self, store_id: StoreId, owner: UserId | None) -> None:
        crowded = crowd(self.all(), store_id, owner)
        if crowded is None:
            return
        sessions, limit = crowded
        idle = [session for session in sessions if not session.is_busy]
        if not idle:
            raise SourceUnreachable(limit)
        self._close([min(idle, key=lambda session: session.used_at)])

    def all(self) -> Iterator[tuple[StoreId, Session]]:
        """Give all connections, each behind its store."""
        return ((store_id, one) for (store_id, _), pool in self._pools.items() for one in pool.sessions)

    def _close(self, sessions: Sequence[Session]) -> None:
        """End connections without waiting for it: who calls next has nothing to do with them."""
        for session in sessions:
            session.stop()
            tasks.start(self._closing, session.close(), name="mcp.close")

    def _secret_values(self, source: Source, server: McpServer) -> dict[str, str]:
        """Return the secrets that a server needs, by the names that it knows them by."""
        values: dict[str, str] = {}
        for name, secret in secrets_of(server).items():
            value = self._secrets.own(source.store_id, secret)
            if value is None:
                raise SourceUnreachable(f"no secret named {secret!r} is configured")
            values[name] = value
        return values

    def _transport(
        self, source: Source, server: McpServer, values: Mapping[str, str]
    ) -> Callable[[Wire], AbstractAsyncContextManager[Streams]]:
        transports = late("transports")
        if isinstance(server, McpHttpConfig):
            client = self._http(source.store_id)
            headers = {**server.headers, **values}
            return lambda wire: transports.http_transport(client, server.url, headers, wire, self._clock)
        order = self._programs.order(server, values)
        program = Program(order, name=f"{source.store_id}/{source.name}", secrets=frozenset(values.values()))
        return lambda wire: transports.stdio_transport(program, wire, self._clock)


async def load() -> None:
    """Import the package `mcp`, which takes most of a second the first time."""
    await asyncio.to_thread(late, "call")


def late(module: str) -> Any:
    """Return a module that imports the package `mcp`; after `load` that takes no time."""
    return importlib.import_module(f"pawl.tool_registry.adapters.mcp.{module}")
