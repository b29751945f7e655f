"""PostgreSQL: a pool that is there when the process starts, and errors that say so when it is not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Self, TypeAlias

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from services.chassis import logs
from services.chassis.migrations import Migrations, Source
from services.chassis.start import StartError
from services.errors import DependencyUnavailable

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]"

_CONNECT_TIMEOUT_SECONDS: Final = 5.0
_BACKOFF_SECONDS: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
_ACQUIRE_TIMEOUT_SECONDS: Final = 5.0
_CLOSE_TIMEOUT_SECONDS: Final = 2.0

# Each statement of Pawl looks rows up by an index, so one plan fits all arguments. Left to itself the server plans many
# of them anew each time, and keeps those that it made for empty tables.
_PLANNING: Final = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}

# The server is there and says no: waiting does not help.
_REFUSALS: Final = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)
# The connection is gone, or the server is going or full.
_UNREACHABLE: Final = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
)

_log = logs.get_logger(__name__)


class Database:
    """A pool of connections to PostgreSQL; an async context manager.

    Entering waits up to `start_timeout_seconds` for the server. Statements are
    cut off by the server after `statement_timeout_seconds`.
    """

    def __init__(
        self,
        url: str,
        *,
        application_name: str,
        connections_max: int = 10,
        statement_timeout_seconds: float = 10.0,
        start_timeout_seconds: float = 30.0,
    ) -> None:
        self._url = url
        self._application_name = application_name
        self._connections_max = connections_max
        self._statement_timeout_seconds = statement_timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._cut_short: set[int] = set()

    async def __aenter__(self) -> Self:
        self._pool = await self._connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_SECONDS):
                await pool.close()
        except (asyncpg.InterfaceError, *_UNREACHABLE):
            pool.terminate()

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        """Give a connection outside a transaction: each statement commits by itself.

        The block should do nothing else than talk to the database: a TimeoutError
        or OSError in it is taken for the database's.

        Raises:
            DependencyUnavailable: the server cannot be reached, stopped in the
                middle, or a statement ran into its timeout. A statement that was
                on its way may or may not have been carried out.
        """
        pool = self._pool
        if pool is None:
            raise DependencyUnavailable("the database is closed")
        try:
            async with pool.acquire(timeout=_ACQUIRE_TIMEOUT_SECONDS) as connection:
                server_pid = connection.get_server_pid()
                try:
                    yield connection
                except asyncio.CancelledError:
                    self._cut_short.add(server_pid)
                    raise
                except asyncpg.InterfaceError as error:
                    # Also what asyncpg says about wrong arguments: that is no outage.
                    if _is_lost(connection):
                        raise asyncpg.ConnectionDoesNotExistError(str(error)) from error
                    raise
                except asyncpg.InternalClientError as error:
                    # The server has said goodbye while nobody asked it anything, and has not hung up yet.
                    connection.terminate()
                    raise asyncpg.ConnectionDoesNotExistError(str(error)) from error
        except _UNREACHABLE as error:
            _log.warning("database.unreachable", error=type(error).__name__)
            too_slow = isinstance(error, TimeoutError | asyncpg.QueryCanceledError)
            raise DependencyUnavailable(
                "the database did not answer in time" if too_slow else "the database cannot be reached"
            ) from error

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """Give a connection inside a transaction: committed at the end, rolled back on any exception.

        Raises:
            DependencyUnavailable: as with `acquire`; if raised while committing,
                the transaction may have been committed.
        """
        async with self.acquire() as connection, connection.transaction():
            yield connection

    async def ping(self) -> None:
        """Return if the server answers.

        Raises:
            DependencyUnavailable: it does not.
        """
        async with self.acquire() as connection:
            await connection.execute("SELECT 1")

    async def migrate(self, schema: str, source: Source) -> int:
        """Bring `schema` to the newest migration of `source`; returns how many were applied.

        Safe to call from several processes at once: they take turns, and each
        migration is applied once. See `chassis.migrations`.

        Raises:
            StartError: an applied migration has changed, or one fails.
            DependencyUnavailable: the server cannot be reached.
        """
        migrations = Migrations(schema, source)
        async with self.acquire() as connection:
            return await migrations.apply(connection)

    async def _take_back(self, connection: Connection) -> None:
        """Take a connection back into the pool, without a round trip as a rule.

        Nobody changes the state of a session for longer than a transaction, and
        asyncpg rolls back what is open when it takes one back. But a statement goes
        out in two halves. For one that is cancelled between them the server waits
        for the end, and whatever came next would belong to it.
        """
        server_pid = connection.get_server_pid()
        if server_pid in self._cut_short:
            self._cut_short.discard(server_pid)
            await connection.execute("SELECT 1")

    async def _connect(self) -> asyncpg.Pool[asyncpg.Record]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._start_timeout_seconds
        attempt = 0
        while True:
            try:
                return await asyncpg.create_pool(
                    self._url,
                    min_size=1,
                    max_size=self._connections_max,
                    timeout=_CONNECT_TIMEOUT_SECONDS,
                    command_timeout=self._statement_timeout_seconds + 1,
                    reset=self._take_back,
                    server_settings={
                        "application_name": self._application_name,
                        "statement_timeout": f"{self._statement_timeout_seconds * 1000:.0f}",
                        "timezone": "UTC",
                        **_PLANNING,
                    },
                )
            except _REFUSALS as error:
                raise StartError(f"PAWL_DATABASE_URL: the database refuses: {error}") from None
            except (ValueError, asyncpg.exceptions.ClientConfigurationError) as error:
                raise StartError(f"PAWL_DATABASE_URL: {error}") from None
            except _UNREACHABLE as error:
                pause = _BACKOFF_SECONDS[min(attempt, len(_BACKOFF_SECONDS) - 1)]
                if loop.time() + pause > deadline:
                    raise StartError(
                        f"PAWL_DATABASE_URL: no database answers after {self._start_timeout_seconds:g} s"
                        f" ({type(error).__name__}): is PostgreSQL running at that address?"
                    ) from None
                if attempt == 0:
                    _log.warning("database.waiting", error=type(error).__name__)
                attempt += 1
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311  # spreads replicas


def _is_lost(connection: Connection) -> bool:
    try:
        return connection.is_closed()
    except asyncpg.InterfaceError:
        # The pool takes a connection back as soon as it breaks.
        return True
