"""Connections of all sources.

Each user of a source has a connection of their own, which is opened on demand and stays open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import httpx2

from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.process import tasks
from pawl.chassis.process.clock import Clock
from pawl.errors import SourceUnreachable
from pawl.server.rpc.fairness import quota
from pawl.tool.v1.source_pb2 import McpHttpConfig
from pawl.tool_registry.secret_file import FileSecrets
from pawl.tool_registry.sources.mcp.config import McpServer, read_config, secrets_of
from pawl.tool_registry.sources.mcp.permission import Programs
from pawl.tool_registry.sources.mcp.session import Connect, Session
from pawl.tool_registry.sources.mcp.transports import http_transport, stdio_transport
from pawl.tool_registry.sources.source import Source

SESSIONS_MAX: Final = 200
_BACKOFF_SECONDS_MAX: Final = 60.0
_STABLE_SECONDS: Final = 60.0
_NO_USER: Final = UserId("\0")

# Returns a new client with a store's egress permissions.
HttpClients = Callable[[StoreId], httpx2.AsyncClient]

# A source's configuration and secrets.
Fingerprint: TypeAlias = tuple[bytes, tuple[tuple[str, str], ...]]


@dataclass(slots=True, kw_only=True)
class SourceConnections:
    """Connections of one source, by user. The key None is for a connection that all users share."""

    fingerprint: Fingerprint
    clock: Clock
    sessions: dict[UserId | None, Session] = field(default_factory=dict)
    problem: str = ""
    # The time from which the next connection may be opened, in monotonic seconds.
    not_before: float = 0.0
    failures: int = 0

    def recover(self) -> None:
        """End the back-off after the server has responded."""
        self.problem, self.not_before, self.failures = "", 0.0, 0

    def ended(self, owner: UserId | None, session: Session) -> None:
        """Remove a connection.

        If the connection broke, delay the next one: not at all after the first failure, then by 1, 2, 4 ... 60 s.
        """
        if self.sessions.get(owner) is session:
            del self.sessions[owner]
        if session.problem:
            now = self.clock.monotonic()
            self.problem = session.problem
            self.failures = 1 if now - session.started_at > _STABLE_SECONDS else self.failures + 1
            pause = 0.0 if self.failures == 1 else min(2.0 ** (self.failures - 2), _BACKOFF_SECONDS_MAX)
            self.not_before = max(self.not_before, now + pause)


class Connections:
    """Connections to MCP servers.

    A connection is closed when it has been idle for `idle_seconds`, when its source changes, and at shutdown. If a call
    times out while its connection is being opened, the connection continues to open.
    """

    def __init__(
        self, *, secrets: FileSecrets, clock: Clock, http: HttpClients, programs: Programs, idle_seconds: float
    ) -> None:
        self._secrets = secrets
        self._clock = clock
        self._http = http
        self._programs = programs
        self._idle_seconds = idle_seconds
        self.by_source: dict[tuple[StoreId, str], SourceConnections] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        by_source, self.by_source = self.by_source, {}
        self._close([session for found in by_source.values() for session in found.sessions.values()])
        await asyncio.gather(*self._closing)

    async def forget(self, store_id: StoreId, name: str) -> None:
        """Close a source's connections and reset its back-off."""
        found = self.by_source.pop((store_id, name), None)
        if found is not None:
            await asyncio.gather(*(session.close() for session in list(found.sessions.values())))

    def all(self) -> Iterator[tuple[StoreId, Session]]:
        return ((store_id, one) for (store_id, _), found in self.by_source.items() for one in found.sessions.values())

    @asynccontextmanager
    async def session(self, source: Source, user_id: UserId) -> AsyncGenerator[Session, None]:
        """Hold a user's connection to a source open inside the context.

        Raises:
            InvalidField: The configuration is invalid.
            PermissionDenied: The deployment does not allow this program.
            SourceUnreachable: The server does not respond, or connections to it are backing off after a failure.
        """
        server = read_config(source.config)
        found = self._of_source(source, server)
        owner = None if server.stateless else user_id
        session = found.sessions.get(owner)
        if session is None or not session.is_open:
            wait = found.not_before - self._clock.monotonic()
            if wait > 0:
                raise SourceUnreachable(f"{found.problem}; the next attempt is in {wait:.0f} s")
            session = self._opened(source, server, found, owner)
        with session.used():
            await session.opened()
            yield session

    @asynccontextmanager
    async def fresh(self, source: Source) -> AsyncGenerator[Session, None]:
        """Open a separate connection, ignoring any back-off, and close it on exit.

        Raises the same errors as `session`.
        """
        server = read_config(source.config)
        found = self._of_source(source, server)
        session = self._opened(source, server, found, _NO_USER)
        try:
            with session.used():
                await session.opened()
                found.recover()
                yield session
        finally:
            self._close([session])

    def _of_source(self, source: Source, server: McpServer) -> SourceConnections:
        fingerprint = (
            source.config.SerializeToString(deterministic=True),
            tuple(sorted(self._secret_values(source, server).items())),
        )
        found = self.by_source.get((source.store_id, source.name))
        if found is None or found.fingerprint != fingerprint:
            self._close([] if found is None else list(found.sessions.values()))
            found = self.by_source[source.store_id, source.name] = SourceConnections(
                fingerprint=fingerprint, clock=self._clock
            )
        return found

    def _opened(self, source: Source, server: McpServer, found: SourceConnections, owner: UserId | None) -> Session:
        values = self._secret_values(source, server)
        self.make_room(source.store_id)
        session = found.sessions[owner] = Session(
            self._connect(source, server, values),
            name=f"{source.store_id}/{source.name}",
            is_shared=owner is None,
            secrets=frozenset(values.values()),
            clock=self._clock,
            idle_seconds=self._idle_seconds,
            on_end=partial(found.ended, owner),
        )
        return session

    def _connect(self, source: Source, server: McpServer, values: Mapping[str, str]) -> Connect:
        if isinstance(server, McpHttpConfig):
            headers = {**server.headers, **values}
            client = self._http(source.store_id)
            return lambda wire: http_transport(client, server.url, headers, wire, self._clock)
        order = self._programs.order(source.store_id, server, values)
        name, secrets = f"{source.store_id}/{source.name}", frozenset(values.values())
        return lambda wire: stdio_transport(order, name=name, secrets=secrets, wire=wire, clock=self._clock)

    def make_room(self, store_id: StoreId) -> None:
        """If the store or this replica has reached its limit, close the connection that has been idle longest.

        Raises:
            SourceUnreachable: All these connections are in use.
        """
        everywhere = [(store, one) for store, one in self.all() if one.is_open]
        own = [one for store, one in everywhere if store == store_id]
        limits = (
            (own, quota(SESSIONS_MAX, len(everywhere) - len(own)), " of this store"),
            ([one for _, one in everywhere], SESSIONS_MAX, ""),
        )
        for found, most, owner_text in limits:
            if len(found) >= most:
                idle = [session for session in found if not session.is_busy]
                if not idle:
                    raise SourceUnreachable(
                        f"{most} connections{owner_text} are in use, which is the limit: try again later"
                    )
                self._close([min(idle, key=lambda session: session.used_at)])
                return

    def _close(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            session.stop()
            tasks.start(self._closing, session.close(), name="mcp.close")

    def _secret_values(self, source: Source, server: McpServer) -> dict[str, str]:
        values: dict[str, str] = {}
        for name, secret in secrets_of(server).items():
            value = self._secrets.own(source.store_id, secret)
            if value is None:
                raise SourceUnreachable(f"no secret named {secret!r} is configured")
            values[name] = value
        return values
