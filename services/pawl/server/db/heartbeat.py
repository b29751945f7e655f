"""A health check for PostgreSQL. It has its own session, so it works while statements wait for the server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Self, TypeAlias

import asyncpg

from pawl.chassis.process import logs, tasks
from pawl.errors import DependencyUnavailable

Session: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

_INTERVAL_SECONDS: Final = 1.0
# A check waits for two windows. If the process itself was delayed, the answer has arrived after the first one.
_WINDOW_SECONDS: Final = 1.25

_UNREACHED: Final = "the database cannot be reached"
_IS_READ_ONLY: Final = "SELECT current_setting('transaction_read_only')::boolean"

_log = logs.get_logger(__name__)


class Heartbeat:
    """Reports whether the server answers and accepts writes. An async context manager that checks until it exits.

    It checks every second while `is_in_use` returns True or the server is unusable.

    If a check gets no answer, `on_frozen` is called, because waiting sessions would otherwise wait forever. If a check
    finds a read-only server, such as a standby or an old primary, `on_read_only` is called.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Session]],
        *,
        is_in_use: Callable[[], bool],
        on_frozen: Callable[[], None],
        on_read_only: Callable[[], Awaitable[None]],
    ) -> None:
        self._connect = connect
        self._is_in_use = is_in_use
        self._on_frozen = on_frozen
        self._on_read_only = on_read_only
        self._session: Session | None = None
        self._check: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        # The server's problem; empty if none is known.
        self.failure = ""
        # True if the last check got no answer or no session; the next check clears it.
        self.is_unavailable = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._repeat(), name="database.heartbeat")
        return self

    async def __aexit__(self, *_: object) -> None:
        await tasks.end([task for task in (self._task, self._check) if task is not None])
        self._forget()

    async def check(self) -> None:
        """Check that the server is usable.

        Raises:
            DependencyUnavailable: The server is not usable.
        """
        if self._check is None or self._check.done():
            self._check = asyncio.get_running_loop().create_task(self._check_once(), name="database.check")
        await tasks.shield(self._check)
        if self.failure:
            raise DependencyUnavailable(self.failure)

    def note_refused(self) -> None:
        """Record that the server refused a session. No new session is opened until the next check."""
        self._note(_UNREACHED, is_unavailable=True)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            if not (self.failure or self._is_in_use()):
                continue
            try:
                await self.check()
            except DependencyUnavailable as error:
                _log.debug("database.unusable", error=error.message)
            except Exception:  # noqa: BLE001  # without checks the server's return would go unnoticed
                _log.exception("database.check_failed")

    async def _check_once(self) -> None:
        asking = asyncio.get_running_loop().create_task(self._ask())
        try:
            done, _ = await asyncio.wait({asking}, timeout=_WINDOW_SECONDS)
            if not done:
                done, _ = await asyncio.wait({asking}, timeout=_WINDOW_SECONDS)
            is_frozen = not done
            failure = "the database does not answer" if is_frozen else asking.result()
        finally:
            if not asking.done():
                self._forget()
                await tasks.end([asking])
        self._note(failure, is_unavailable=is_frozen or failure == _UNREACHED)
        if is_frozen:
            self._on_frozen()

    async def _ask(self) -> str:
        """Return the server's problem, or an empty string if it is usable."""
        try:
            if self._session is None or self._session.is_closed():
                self._session = await self._connect()
            if not await self._session.fetchval(_IS_READ_ONLY):
                return ""
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
            self._forget()
            return _UNREACHED
        # A new session may reach the server that has taken over.
        self._forget()
        await self._on_read_only()
        return "the database is read-only"

    def _note(self, failure: str, *, is_unavailable: bool) -> None:
        if failure and failure != self.failure:
            _log.warning("database.lost", error=failure)
        self.failure, self.is_unavailable = failure, is_unavailable

    def _forget(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.terminate()
