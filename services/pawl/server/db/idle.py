"""Pooled connections that stay checked out between uses. This is cheaper than returning them."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Final, TypeAlias

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from pawl.chassis.process.tasks import shield

PooledConnection: TypeAlias = "PoolConnectionProxy[asyncpg.Record]"

# Connections opened by a burst are closed after this time: each costs PostgreSQL a process of 5 to 10 MB.
UNUSED_SECONDS_MAX: Final = 60.0

_RELEASE_TIMEOUT_SECONDS: Final = 1.0
# One use in this many goes through the pool, which replaces connections after 50,000 statements.
_USES: Final = 1000


class PoolConnection(asyncpg.Connection):
    """A connection that rolls back an open transaction on return to the pool, even after an interrupted ROLLBACK."""

    async def _reset(self) -> None:
        # Otherwise asyncpg reports a transaction that was never ended to the event loop.
        if self.is_in_transaction():
            await self.execute("ROLLBACK")
        await super()._reset()


class IdleConnections:
    """Holds connections from a pool. Returns a connection only if a caller is waiting or the connection is broken.

    Taking and returning a pool connection costs a task and three timers, which is more than sending a statement.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool
        self._idle: deque[tuple[PooledConnection, float]] = deque()
        # The number of callers waiting for the pool.
        self.waiting = 0
        self._uses = 0
        self._is_closed = False
        # Incremented each time all connections expire.
        self.generation = 0

    @property
    def has_idle(self) -> bool:
        return bool(self._idle)

    async def take(self, deadline: float) -> PooledConnection:
        """Return a connection before the deadline.

        Raises:
            TimeoutError: All connections are in use.
            Exception: The pool cannot open a connection.
        """
        while self._idle:
            connection, _ = self._idle.pop()
            if not is_lost(connection):
                return connection
            await self._release(connection)
        self.waiting += 1
        try:
            return await self._pool.acquire(timeout=max(0.001, deadline - asyncio.get_running_loop().time()))
        finally:
            self.waiting -= 1

    async def give(self, connection: PooledConnection, *, generation: int, is_fit: bool) -> None:
        """Store a connection for the next caller, or return it to the pool.

        `is_fit` means that the connection had no error.

        Raises:
            Exception: The pool could not accept the connection and closed it.
        """
        self._uses += 1
        is_due = self.waiting or self._is_closed or generation != self.generation or not self._uses % _USES
        if is_due or not is_fit or is_lost(connection) or connection.is_in_transaction():
            await self._release(connection)
            return
        now = asyncio.get_running_loop().time()
        self._idle.append((connection, now))
        # The most recently used connection is taken first, so the longest idle ones are at the other end.
        while now - self._idle[0][1] > UNUSED_SECONDS_MAX:
            _end(self._idle.popleft()[0])

    async def expire(self) -> None:
        """Expire all open sessions. None of them is reused after its current use."""
        self.generation += 1
        await self._pool.expire_connections()
        while self._idle:
            _end(self._idle.pop()[0])

    async def close(self) -> None:
        """Return idle connections to the pool. Connections in use return to the pool once they are given back."""
        self._is_closed = True
        while self._idle:
            await self._release(self._idle.pop()[0])

    async def _release(self, connection: PooledConnection) -> None:
        # The pool shields its own work, and asyncio would report its failure if it was not awaited.
        await shield(self._pool.release(connection, timeout=_RELEASE_TIMEOUT_SECONDS))


def _end(connection: PooledConnection) -> None:
    # Frees the connection's slot. The pool may already have reclaimed the connection if it broke.
    with suppress(asyncpg.InterfaceError):
        connection.terminate()


def is_lost(connection: PooledConnection) -> bool:
    try:
        return connection.is_closed()
    except asyncpg.InterfaceError:
        # The pool reclaims a connection as soon as it breaks.
        return True
