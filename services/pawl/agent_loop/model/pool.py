"""Connections to one model server, kept for the next call."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

from pawl.agent_loop.model import failure
from pawl.agent_loop.model.connection import Connection
from pawl.agent_loop.model.request import ModelError
from pawl.chassis.egress.lookups import look_up
from pawl.chassis.process.tasks import shield

CONNECTIONS_MAX: Final = 1000
"""Most connections in use; who wants one more waits."""

IDLE_MAX: Final = 100
"""Most connections kept."""

IDLE_SECONDS: Final = 60.0
"""The time for which an idle one is kept."""

_NEXT_ADDRESS_SECONDS: Final = 0.25  # RFC 8305, 5: the delay between attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The address of the model server. `tls` is the context to meet it with, None for plain HTTP."""

    host: str
    port: int
    tls: ssl.SSLContext | None


class Pool:
    """The one used last is used first, so that the others grow old and go."""

    def __init__(self, origin: Origin, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._origin = origin
        self._idle_seconds = idle_seconds
        self._places = asyncio.Semaphore(CONNECTIONS_MAX)
        # Each with the time at which it is too old, the oldest first.
        self._idle: dict[Connection, float] = {}
        self._open: set[Connection] = set()
        self._lookup: asyncio.Future[Sequence[AddrInfoType]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()
        self._closed = False

    async def take(self) -> Connection:
        """Return a connection that is open now; it goes back by `give`.

        Raises:
            ModelError: NETWORK.
        """
        await self._places.acquire()
        try:
            while self._idle:
                connection, _ = self._idle.popitem()
                if connection.is_alive():
                    return connection
                connection.close()
            return await self._connect()
        except BaseException:
            self._places.release()
            raise

    def give(self, connection: Connection) -> None:
        """Take a connection back: it is kept if its response was read to the end, and closed if not."""
        self._places.release()
        if self._closed or not connection.reusable or len(self._idle) >= IDLE_MAX:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        self._idle[connection] = loop.time() + self._idle_seconds
        if self._timer is None:
            self._timer = loop.call_later(self._idle_seconds, self._sweep, loop.time)

    async def close(self) -> None:
        """Close every connection, those in use too, and return when they are closed."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for connection in self._open:
            connection.close()
        while self._open:
            self._emptied.clear()
            await self._emptied.wait()

    async def _connect(self) -> Connection:
        loop, origin = asyncio.get_running_loop(), self._origin
        try:
            addresses = await self._addresses()
            connected = await aiohappyeyeballs.start_connection(
                addresses, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS, loop=loop
            )
            try:
                _, connection = await loop.create_connection(
                    lambda: Connection(self._lost),
                    sock=connected,
                    ssl=origin.tls,
                    server_hostname=origin.host if origin.tls else None,
                )
            except BaseException:
                connected.close()
                raise
        except OSError:
            raise ModelError(failure.NETWORK) from None
        self._open.add(connection)
        return connection

    async def _addresses(self) -> Sequence[AddrInfoType]:
        """Return the addresses of the model server, looked up once for all who wait for them."""
        if self._lookup is None:
            self._lookup = asyncio.ensure_future(look_up(self._origin.host, self._origin.port))
            self._lookup.add_done_callback(self._looked_up)
        return await shield(self._lookup)

    def _looked_up(self, _: asyncio.Future[Sequence[AddrInfoType]]) -> None:
        self._lookup = None

    def _lost(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._open.discard(connection)
        if not self._open:
            self._emptied.set()

    def _sweep(self, now: Callable[[], float]) -> None:
        """Close what is too old, and come again for the oldest of the others."""
        self._timer = None
        for connection, expires_at in list(self._idle.items()):
            if expires_at > now():
                self._timer = asyncio.get_running_loop().call_at(expires_at, self._sweep, now)
                return
            del self._idle[connection]
            connection.close()
