"""A look at PostgreSQL every second, on a session that nothing else uses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Self, TypeAlias

import asyncpg

from pawl.chassis.process import logs, tasks
from pawl.errors import DependencyUnavailable

Session: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

_INTERVAL_SECONDS: Final = 1.0
# An answer may take two of these. A process that was held up itself finds the answer after the first.
_WINDOW_SECONDS: Final = 1.25

_UNREACHED: Final = "the database cannot be reached"
_IS_READ_ONLY: Final = "SELECT current_setting('transaction_read_only')::boolean"

_log = logs.get_logger(__name__)


class Heartbeat:
    """Says whether the server answers and takes writes; an async context manager that looks until its end.

    `on_frozen` is called after each look that got no answer at all: sessions that
    wait will wait on. `on_read_only` is called after each that found a server
    that takes no writes, as a standby and an old primary do.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Session]],
        *,
        on_frozen: Callable[[], None],
        on_read_only: Callable[[], Awaitable[None]],
    ) -> None:
        self._connect = connect
        self._on_frozen = on_frozen
        self._on_read_only = on_read_only
        self._session: Session | None = None
        self._look: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._looked_at = float("-inf")
        self.failure = ""
        """What is wrong with the server; empty if nothing is known to be."""
        self.is_away = False
        """True if the server did not answer, or took no session, when it was last asked: the next look asks again."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self._repeat(), name="database.heartbeat")
        return self

    async def __aexit__(self, *_: object) -> None:
        await tasks.end([task for task in (self._task, self._look) if task is not None])
        self._forget()

    async def check(self) -> None:
        """Return if the server can be used, after a look of now.

        Raises:
            DependencyUnavailable: it cannot.
        """
        if self._look is None or self._look.done():
            self._look = asyncio.get_running_loop().create_task(self._look_once(), name="database.look")
        await tasks.shield(self._look)
        if self.failure:
            raise DependencyUnavailable(self.failure)

    def note_refused(self) -> None:
        """Note that the server has refused a session: until the next look nobody else need ask for one."""
        self._note(_UNREACHED, is_away=True)

    async def _repeat(self) -> None:
        while True:
            try:
                await self.check()
            except DependencyUnavailable as error:
                _log.debug("database.unusable", error=error.message)
            except Exception:  # noqa: BLE001  # without looks, nobody would learn that the server is back
                _log.exception("database.look_failed")
            # Health looks too, and what it has seen is as good.
            pause = _INTERVAL_SECONDS
            while pause > 0:
                await asyncio.sleep(pause)
                pause = self._looked_at + _INTERVAL_SECONDS - asyncio.get_running_loop().time()

    async def _look_once(self) -> None:
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
        self._note(failure, is_away=is_frozen or failure == _UNREACHED)
        self._looked_at = asyncio.get_running_loop().time()
        if is_frozen:
            self._on_frozen()

    async def _ask(self) -> str:
        """Return what is wrong with the server, or an empty text."""
        try:
            if self._session is None or self._session.is_closed():
                self._session = await self._connect()
            if not await self._session.fetchval(_IS_READ_ONLY):
                return ""
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
            self._forget()
            return _UNREACHED
        # A new session may find the server that has taken over.
        self._forget()
        await self._on_read_only()
        return "the database takes no writes"

    def _note(self, failure: str, *, is_away: bool) -> None:
        if failure and failure != self.failure:
            _log.warning("database.lost", error=failure)
        self.failure, self.is_away = failure, is_away

    def _forget(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.terminate()
