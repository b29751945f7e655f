"""The connections of all sources: one for each user of a source, opened when it is needed and kept for later calls."""

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
from pawl.chassis.rpc.fairness import quota
from pawl.errors import SourceUnreachable
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

HttpClients = Callable[[StoreId], httpx2.AsyncClient]
"""Store to a fresh client that reaches what the store's tools may reach."""

_MadeOf: TypeAlias = tuple[bytes, tuple[tuple[str, str], ...]]
"""The configuration and the secrets of a source."""


@dataclass(slots=True, kw_only=True)
class Line:
    """The connections of one source, by user; None for the one that all users share."""

    made_of: _MadeOf
    clock: Clock
    sessions: dict[UserId | None, Session] = field(default_factory=dict)
    problem: str = ""
    not_before: float = 0.0
    """The time from which the next connection may be opened, by the monotonic clock."""
    failures: int = 0

    def recover(self) -> None:
        """End the back-off, because the server has just answered."""
        self.problem, self.not_before, self.failures = "", 0.0, 0

    def ended(self, owner: UserId | None, session: Session) -> None:
        """Remove a connection; after one that broke the next waits: none the first time, then 1, 2, 4 ... 60 s."""
        if self.sessions.get(owner) is session:
            del self.sessions[owner]
        if session.problem:
            now = self.clock.monotonic()
            self.problem = session.problem
            self.failures = 1 if now - session.began_at > _STABLE_SECONDS else self.failures + 1
            pause = 0.0 if self.failures == 1 else min(2.0 ** (self.failures - 2), _BACKOFF_SECONDS_MAX)
            self.not_before = max(self.not_before, now + pause)


class Connections:
    """Connections with MCP servers.

    One is closed when it is idle for `idle_seconds`, when its source changes, and at the end. One that opens continues
    to open after the call that needed it has run out of time.
    """

    def __init__(
        self, *, secrets: FileSecrets, clock: Clock, http: HttpClients, programs: Programs, idle_seconds: float
    ) -> None:
        self._secrets = secrets
        self._clock = clock
        self._http = http
        self._programs = programs
        self._idle_seconds = idle_seconds
        self.lines: dict[tuple[StoreId, str], Line] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End them all."""
        lines, self.lines = self.lines, {}
        self._close([session for line in lines.values() for session in line.sessions.values()])
        await asyncio.gather(*self._closing)

    async def forget(self, store_id: StoreId, name: str) -> None:
        """End the connections of a source, and forget its crashes."""
        line = self.lines.pop((store_id, name), None)
        if line is not None:
            await asyncio.gather(*(session.close() for session in list(line.sessions.values())))

    def all(self) -> Iterator[tuple[StoreId, Session]]:
        """Give all connections, each behind its store."""
        return ((store_id, one) for (store_id, _), line in self.lines.items() for one in line.sessions.values())

    @asynccontextmanager
    async def session(self, source: Source, user_id: UserId) -> AsyncGenerator[Session, None]:
        """Keep a user's connection to a source open inside the context.

        Raises:
            InvalidField: the configuration cannot be used.
            PermissionDenied: the deployment does not allow the program.
            SourceUnreachable: it does not answer, or failed too recently to be tried again.
        """
        server = read_config(source.config)
        line = self._line(source, server)
        owner = None if server.stateless else user_id
        session = line.sessions.get(owner)
        if session is None or not session.is_open:
            wait = line.not_before - self._clock.monotonic()
            if wait > 0:
                raise SourceUnreachable(f"{line.problem}; it is tried again in {wait:.0f} s")
            session = self._opened(source, server, line, owner)
        with session.used():
            await session.opened()
            yield session

    @asynccontextmanager
    async def fresh(self, source: Source) -> AsyncGenerator[Session, None]:
        """Open a connection that no user shares, even while a source that failed waits; close it at the end.

        Raises as `session`.
        """
        server = read_config(source.config)
        line = self._line(source, server)
        session = self._opened(source, server, line, _NO_USER)
        try:
            with session.used():
                await session.opened()
                line.recover()
                yield session
        finally:
            self._close([session])

    def _line(self, source: Source, server: McpServer) -> Line:
        """Return the line of a source as it is now; the connections of an older configuration end."""
        made_of = (
            source.config.SerializeToString(deterministic=True),
            tuple(sorted(self._secret_values(source, server).items())),
        )
        line = self.lines.get((source.store_id, source.name))
        if line is None or line.made_of != made_of:
            self._close([] if line is None else list(line.sessions.values()))
            line = self.lines[source.store_id, source.name] = Line(made_of=made_of, clock=self._clock)
        return line

    def _opened(self, source: Source, server: McpServer, line: Line, owner: UserId | None) -> Session:
        """Start to open a connection."""
        values = self._secret_values(source, server)
        self.make_room(source.store_id)
        session = line.sessions[owner] = Session(
            self._connect(source, server, values),
            name=f"{source.store_id}/{source.name}",
            is_shared=owner is None,
            secrets=frozenset(values.values()),
            clock=self._clock,
            idle_seconds=self._idle_seconds,
            on_end=partial(line.ended, owner),
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
        """Close the connection that was idle for longest where a store, or the replica, has as many as it may have."""
        everywhere = [(store, one) for store, one in self.all() if one.is_open]
        own = [one for store, one in everywhere if store == store_id]
        limits = (
            (own, quota(SESSIONS_MAX, len(everywhere) - len(own)), " of this store"),
            ([one for _, one in everywhere], SESSIONS_MAX, ""),
        )
        for found, most, whose in limits:
            if len(found) >= most:
                idle = [session for session in found if not session.is_busy]
                if not idle:
                    raise SourceUnreachable(f"{most} connections{whose} are in use here, which is the limit")
                self._close([min(idle, key=lambda session: session.used_at)])
                return

    def _close(self, sessions: Sequence[Session]) -> None:
        """End connections without waiting for that."""
        for session in sessions:
            session.stop()
            tasks.start(self._closing, session.close(), name="mcp.close")

    def _secret_values(self, source: Source, server: McpServer) -> dict[str, str]:
        """Return the secrets that a server needs, by the names of its variables or headers."""
        values: dict[str, str] = {}
        for name, secret in secrets_of(server).items():
            value = self._secrets.own(source.store_id, secret)
            if value is None:
                raise SourceUnreachable(f"no secret named {secret!r} is configured")
            values[name] = value
        return values
