"""Connections of a pool that stay at hand from one use to the next."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Final, TypeAlias

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from pawl.chassis.process.tasks import shield

Lent: TypeAlias = "PoolConnectionProxy[asyncpg.Record]"

UNUSED_SECONDS_MAX: Final = 60.0
"""The time unused after which what a burst has opened is closed: PostgreSQL has a process of 5 to 10 MB for each."""

_RELEASE_TIMEOUT_SECONDS: Final = 1.0
# Every so many uses one goes through the pool, which makes a new one after 50,000 statements.
_USES: Final = 1000


class PoolConnection(asyncpg.Connection):
    """Rolls back what is open when its pool takes it back, also where the ROLLBACK was cut short: nobody's failure."""

    async def _reset(self) -> None:
        # asyncpg takes this for a transaction that was never ended, and tells the event loop of a fault.
        if self.is_in_transaction():
            await self.execute("ROLLBACK")
        await super()._reset()


class KeptConnections:
    """Takes connections from a pool, and gives them back to it only when somebody waits, or something went wrong.

    To take one from a pool and to give it back takes a task and three timers, which is more than to send a statement.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool
        self._idle: deque[tuple[Lent, float]] = deque()
        self._waiting = 0
        self._uses = 0
        self._is_closed = False
        self.generation = 0
        """The number of times that all connections were expired."""

    async def take(self, deadline: float) -> Lent:
        """Return a connection, by then.

        Raises:
            TimeoutError: all are in use.
            Exception: what the pool raises where none can be opened.
        """
        while self._idle:
            connection, _ = self._idle.pop()
            if not is_lost(connection):
                return connection
            await self._release(connection)
        self._waiting += 1
        try:
            return await self._pool.acquire(timeout=max(0.001, deadline - asyncio.get_running_loop().time()))
        finally:
            self._waiting -= 1

    async def give(self, connection: Lent, *, generation: int, is_fit: bool) -> None:
        """Take a connection back that was taken in a generation; `is_fit`: nothing went wrong with it.

        Raises:
            Exception: what the pool raises that cannot take it back; it is dropped then.
        """
        self._uses += 1
        is_due = self._waiting or self._is_closed or generation != self.generation or not self._uses % _USES
        if is_due or not is_fit or is_lost(connection) or connection.is_in_transaction():
            await self._release(connection)
            return
        now = asyncio.get_running_loop().time()
        self._idle.append((connection, now))
        # The last one is used first, so those of a burst are at the other end.
        while now - self._idle[0][1] > UNUSED_SECONDS_MAX:
            _end(self._idle.popleft()[0])

    async def expire(self) -> None:
        """Give out none of the sessions that are open now again."""
        self.generation += 1
        await self._pool.expire_connections()
        while self._idle:
            _end(self._idle.pop()[0])

    async def close(self) -> None:
        """Give the pool all that nobody uses, and what comes back from now on."""
        self._is_closed = True
        while self._idle:
            await self._release(self._idle.pop()[0])

    async def _release(self, connection: Lent) -> None:
        # It shields itself, and tells of a failure that nobody has waited for.
        await shield(self._pool.release(connection, timeout=_RELEASE_TIMEOUT_SECONDS))


def _end(connection: Lent) -> None:
    # Unless the pool has taken it back by itself, also one that has broken: it gives its place back by this.
    with suppress(asyncpg.InterfaceError):
        connection.terminate()


def is_lost(connection: Lent) -> bool:
    """Return whether a connection is of no more use because it has broken."""
    try:
        return connection.is_closed()
    except asyncpg.InterfaceError:
        # The pool takes a connection back as soon as it breaks.
        return True
