"""A PostgreSQL connection pool that waits for the server at start and reports outages as DependencyUnavailable."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Any, Final, Self, TypeAlias, TypeVar

import asyncpg
from asyncpg.exceptions import TargetServerAttributeNotMatched
from asyncpg.pool import PoolConnectionProxy

from pawl.chassis.process import logs
from pawl.chassis.process.start import StartError
from pawl.errors import DependencyUnavailable
from pawl.server.db import schema as schemas
from pawl.server.db.heartbeat import Heartbeat
from pawl.server.db.idle import UNUSED_SECONDS_MAX, IdleConnections, PoolConnection, PooledConnection, is_lost
from pawl.server.db.rights import Rights

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]"

_CONNECT_TIMEOUT_SECONDS: Final = 5.0
_BACKOFF_SECONDS: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
_ACQUIRE_TIMEOUT_SECONDS: Final = 4.0
# One in this many connections is reserved for urgent work.
_RESERVED_PART: Final = 3
_CLOSE_TIMEOUT_SECONDS: Final = 2.0

# Every statement in Pawl looks up rows by an index, so one plan fits all arguments. By default the server would re-plan
# many statements each time, and keep plans made for empty tables.
_PLANNING: Final = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}

# The server refuses the login, so waiting at start does not help.
_REFUSALS: Final = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)
# The connection is lost, or the server is stopping or full.
_UNREACHABLE: Final = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
)
# The server accepts no sessions: it is down, starting or stopping.
_REFUSING: Final = (ConnectionRefusedError, FileNotFoundError, asyncpg.CannotConnectNowError)
# A broken session. If the server is unavailable, the heartbeat logs that once.
_BROKEN: Final = (OSError, asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError)
# The session is no longer usable: the server is read-only, cannot read its files, or has ended the session.
_UNFIT: Final = (
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.PostgresSystemError,
)
# The schema has changed: the next attempt plans the statement again.
_OUTDATED: Final = (asyncpg.InvalidCachedStatementError, asyncpg.OutdatedSchemaCacheError)
_UNUSABLE: Final = (*_UNREACHABLE, *_UNFIT, *_OUTDATED)
# When opening a session fails, no statement has been sent.
_NO_SESSION: Final = (*_UNREACHABLE, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)

_log = logs.get_logger(__name__)


class Database:
    """A pool of connections to PostgreSQL. An async context manager.

    Entering it waits up to `start_timeout_seconds` for the server. The server cancels a statement after
    `statement_timeout_seconds`. Errors name `variable` as the source of the URL. After each wait for a connection,
    `waited` is called with its duration in seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        application_name: str,
        connections_max: int = 10,
        statement_timeout_seconds: float = 10.0,
        start_timeout_seconds: float = 30.0,
        variable: str = "PAWL_DATABASE_URL",
        waited: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._url = url
        self._variable = variable
        self._application_name = application_name
        self._connections_max = connections_max
        self._statement_timeout_seconds = statement_timeout_seconds
        # The client's own timeout, in case the server does not cancel the statement.
        self._command_timeout_seconds = statement_timeout_seconds + 1
        self._start_timeout_seconds = start_timeout_seconds
        self._waited = waited
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._kept: IdleConnections | None = None
        # The connections in use, and when each was taken.
        self._held: dict[Connection, float] = {}
        self._cut_short: set[int] = set()
        self._ordinary = asyncio.Semaphore(connections_max - connections_max // _RESERVED_PART)
        self._heartbeat = Heartbeat(
            self._open_session,
            is_in_use=self._is_in_use,
            on_frozen=self._cut,
            on_read_only=self._renew,
        )

    async def __aenter__(self) -> Self:
        self._pool = await self._connect()
        self._kept = IdleConnections(self._pool)
        await self._heartbeat.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        pool, idle = self._pool, self._kept
        self._pool = self._kept = None
        if pool is None or idle is None:
            return
        await self._heartbeat.__aexit__()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_SECONDS):
                await idle.close()
                await pool.close()
        except (asyncpg.InterfaceError, *_UNREACHABLE):
            pool.terminate()

    @asynccontextmanager
    async def acquire(self, *, urgent: bool = False) -> AsyncIterator[Connection]:
        """Lend a connection outside a transaction. Each statement commits on its own.

        The block should only talk to the database, because any TimeoutError or OSError raised in it is reported as a
        database error. A third of the connections are reserved for `urgent` work, so that leases can be renewed without
        waiting for reads.

        Raises:
            DependencyUnavailable: The server is unreachable, unusable or stopped, or a statement timed out. A statement
                in progress may or may not have been executed.
        """
        idle = self._kept
        if idle is None:
            raise DependencyUnavailable("the database is closed")
        deadline = asyncio.get_running_loop().time() + _ACQUIRE_TIMEOUT_SECONDS
        async with nullcontext() if urgent else self._slot(deadline):
            # Read this before taking a connection, because all connections may expire while this one is being opened.
            generation = idle.generation
            connection = await self._take(idle, deadline)
            try:
                async with self._lent(idle, connection, generation):
                    yield connection
            except _UNUSABLE as error:
                raise _unavailable(error) from error

    @asynccontextmanager
    async def transaction(self, *, urgent: bool = False) -> AsyncIterator[Connection]:
        """Lend a connection inside a transaction, which is committed at the end or rolled back on any exception.

        Raises:
            DependencyUnavailable: See `acquire`. If the commit fails in this way, the transaction may have been
                committed.
        """
        async with self.acquire(urgent=urgent) as connection, connection.transaction():
            yield connection

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Connection]:
        """Lend a connection inside a read-only snapshot of the database. Raises the same errors as `acquire`."""
        async with self.acquire() as connection, connection.transaction(isolation="repeatable_read", readonly=True):
            yield connection

    async def fetch(self, statement: str, *arguments: Any, urgent: bool = False) -> list[asyncpg.Record]:
        """Return the rows of one statement, which commits on its own. Raises the same errors as `acquire`."""
        async with self.acquire(urgent=urgent) as connection:
            return await connection.fetch(statement, *arguments)

    async def fetchrow(self, statement: str, *arguments: Any, urgent: bool = False) -> asyncpg.Record | None:
        """Return the first row of one statement, or None if it returns no rows. See `fetch`."""
        async with self.acquire(urgent=urgent) as connection:
            return await connection.fetchrow(statement, *arguments)

    async def fetchval(self, statement: str, *arguments: Any, urgent: bool = False) -> Any:
        """Return the first column of the first row of one statement, or None if it returns no rows. See `fetch`."""
        async with self.acquire(urgent=urgent) as connection:
            return await connection.fetchval(statement, *arguments)

    async def execute(self, statement: str, *arguments: Any, urgent: bool = False) -> str:
        """Run one statement and return its command tag. See `fetch`."""
        async with self.acquire(urgent=urgent) as connection:
            return await connection.execute(statement, *arguments)

    async def ping(self) -> None:
        """Check that the server answers and accepts writes. This does not use a pool connection.

        Raises:
            DependencyUnavailable: The server does not answer, or does not accept writes.
        """
        if self._pool is None:
            raise DependencyUnavailable("the database is closed")
        await self._heartbeat.check()

    async def _take(self, idle: IdleConnections, deadline: float) -> PooledConnection:
        if self._heartbeat.is_unavailable:
            raise DependencyUnavailable(self._heartbeat.failure)
        try:
            with nullcontext() if idle.has_idle else self._timed():
                return await idle.take(deadline)
        except _NO_SESSION as error:
            if isinstance(error, _REFUSING):
                self._heartbeat.note_refused()
            raise _unavailable(error) from error

    @asynccontextmanager
    async def _slot(self, deadline: float) -> AsyncIterator[None]:
        slots = self._ordinary
        if slots.locked():
            try:
                with self._timed():
                    async with asyncio.timeout_at(deadline):
                        await slots.acquire()
            except TimeoutError as error:
                raise _unavailable(error) from error
        else:
            # With a free slot there is no wait and no need for a timer.
            await slots.acquire()
        try:
            yield
        finally:
            slots.release()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        clock = asyncio.get_running_loop()
        started = clock.time()
        try:
            yield
        finally:
            self._waited(clock.time() - started)

    @asynccontextmanager
    async def _lent(self, idle: IdleConnections, connection: PooledConnection, generation: int) -> AsyncIterator[None]:
        server_pid = connection.get_server_pid()
        self._held[connection] = asyncio.get_running_loop().time()
        is_fit = False
        try:
            yield
            is_fit = True
        except asyncio.CancelledError:
            self._cut_short.add(server_pid)
            raise
        except asyncpg.InterfaceError as error:
            # asyncpg also raises this for wrong arguments, which is not an outage.
            if is_lost(connection):
                raise asyncpg.ConnectionDoesNotExistError(str(error)) from error
            raise
        except _UNFIT:
            connection.terminate()
            await idle.expire()
            raise
        except _OUTDATED:
            raise
        except asyncpg.InternalClientError as error:
            # The server has announced the end of the session but not closed the connection yet.
            connection.terminate()
            raise asyncpg.ConnectionDoesNotExistError(str(error)) from error
        finally:
            del self._held[connection]
            # A connection that cannot be returned is terminated. Its work is already done.
            with suppress(*_NO_SESSION):
                await idle.give(connection, generation=generation, is_fit=is_fit)

    def _is_in_use(self) -> bool:
        """Return whether a caller may be waiting for the server."""
        # A connection held for longer waits for no statement: it listens for notifications.
        since = asyncio.get_running_loop().time() - self._command_timeout_seconds
        return bool(self._kept and self._kept.waiting) or any(taken > since for taken in self._held.values())

    def _cut(self) -> None:
        """Close the connections that are waiting for a frozen server."""
        for connection in self._held:
            # An old connection whose user has not noticed yet that it is lost.
            with suppress(asyncpg.InterfaceError):
                connection.terminate()

    async def _renew(self) -> None:
        if self._kept is not None:
            await self._kept.expire()

    async def create_schema(self, schema: str, sql: str | None = None, rights: Rights | None = None) -> bool:
        """Create `schema` from `sql` or the service's `schema.sql`, unless it exists. Return whether it was created.

        Atomic, and safe to call from several processes concurrently. `rights` are granted to another role.

        Raises:
            StartError: Another version created the schema, or the pool's role may not create it.
            DependencyUnavailable: The server cannot be reached.
        """
        async with self.acquire(urgent=True) as connection:
            return await schemas.create(connection, schema, schemas.read(schema) if sql is None else sql, rights)

    async def _reset(self, connection: Connection) -> None:
        """Reset a connection that returns to the pool, usually without a round trip.

        No session state outlives a transaction, and asyncpg rolls back an open transaction. However, asyncpg sends a
        statement in two parts. If the statement is cancelled between them, the server waits for the second part and
        would mistake the next statement for it.
        """
        server_pid = connection.get_server_pid()
        if server_pid in self._cut_short:
            self._cut_short.discard(server_pid)
            await connection.execute("SELECT 1")

    async def _open_session(self) -> asyncpg.Connection[asyncpg.Record]:
        settings = {"application_name": f"{self._application_name}-heartbeat"}
        return await asyncpg.connect(self._url, timeout=_CONNECT_TIMEOUT_SECONDS, server_settings=settings)

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
                    command_timeout=self._command_timeout_seconds,
                    max_inactive_connection_lifetime=UNUSED_SECONDS_MAX,
                    reset=self._reset,
                    connection_class=PoolConnection,
                    server_settings={
                        "application_name": self._application_name,
                        "statement_timeout": f"{self._statement_timeout_seconds * 1000:.0f}",
                        "timezone": "UTC",
                        **_PLANNING,
                    },
                )
            except _REFUSALS as error:
                raise StartError(f"{self._variable}: the database refused the connection: {error}") from None
            except ssl.SSLCertVerificationError as error:
                raise StartError(
                    f"{self._variable}: the database's certificate is not trusted: {error.verify_message}"
                ) from None
            except (ValueError, asyncpg.exceptions.ClientConfigurationError) as error:
                raise StartError(f"{self._variable}: {error}") from None
            except (*_UNREACHABLE, TargetServerAttributeNotMatched) as error:
                pause = _BACKOFF_SECONDS[min(attempt, len(_BACKOFF_SECONDS) - 1)]
                if loop.time() + pause > deadline:
                    raise StartError(
                        f"{self._variable}: no database answered within {self._start_timeout_seconds:g} s"
                        f" ({type(error).__name__}): is PostgreSQL running at that address?"
                    ) from None
                if attempt == 0:
                    _log.warning("database.waiting", error=type(error).__name__)
                attempt += 1
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311  # spreads replicas


class DatabaseAdapter:
    def __init__(self, database: Database) -> None:
        self._database = database


def affected(tag: str) -> int:
    """Return the row count of a command tag like `INSERT 0 3` or `DELETE 3`."""
    return int(tag.rpartition(" ")[2])


def _unavailable(error: Exception) -> DependencyUnavailable:
    is_slow = isinstance(error, TimeoutError | asyncpg.QueryCanceledError)
    log = _log.debug if isinstance(error, _BROKEN) and not is_slow else _log.warning
    log("database.unreachable", error=type(error).__name__)
    if is_slow:
        return DependencyUnavailable("the database did not answer in time")
    if isinstance(error, asyncpg.ReadOnlySQLTransactionError):
        return DependencyUnavailable("the database is read-only")
    return DependencyUnavailable("the database cannot be reached or used")


R = TypeVar("R")
T = TypeVar("T")


def read_each(kind: str, rows: Iterable[R], read: Callable[[R], T], id_of: Callable[[R], object]) -> list[T]:
    """Return the result of `read` for each row. Skip a row for which `read` raises, and log the row's id."""
    found: list[T] = []
    for row in rows:
        try:
            found.append(read(row))
        except Exception:  # noqa: BLE001  # read the other rows
            _log.exception("row.unreadable", kind=kind, id=id_of(row))
    return found
