"""Names looked up by the operating system, however slowly name servers answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from aiohappyeyeballs import AddrInfoType as AddressInfo

from pawl.chassis.rpc.shares import Places

AT_ONCE_MAX: Final = 128
"""Names that are looked up at the same time."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""From host and port to addresses, the preferred ones first; raises OSError if there are none."""


async def look_up(host: str, port: int) -> Sequence[AddressInfo]:
    """Return what the operating system knows of a host, as `socket.getaddrinfo` does.

    Each call has a thread of its own, which does not keep the process alive: uvloop has two for all names.

    Raises:
        OSError: there is no such host.
    """
    # As bytes, for which there is nothing to be encoded by rules of its own.
    loop, name = asyncio.get_running_loop(), host.encode("ascii")
    answer: asyncio.Future[Sequence[AddressInfo]] = loop.create_future()

    def ask() -> None:
        settle: Callable[[], None]
        try:
            settle = partial(answer.set_result, socket.getaddrinfo(name, port, type=socket.SOCK_STREAM))
        except Exception as error:  # noqa: BLE001  # whatever it is, it is for whoever waits
            settle = partial(answer.set_exception, error)
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(lambda: None if answer.done() else settle())

    threading.Thread(target=ask, name="lookup", daemon=True).start()
    return await answer


async def resolve_by_system(host: str, port: int) -> list[str]:
    """Return the addresses of a host as the operating system knows them."""
    return [str(sockaddr[0]) for *_, sockaddr in await look_up(host, port)]


class Lookups:
    """Look-ups, so many at once, which cannot be stopped, and of which each key (a store) has its share."""

    def __init__(self, resolve: Resolve = resolve_by_system, *, at_once_max: int = AT_ONCE_MAX) -> None:
        self._resolve = resolve
        self._places = Places(at_once_max)

    async def begin(self, key: Hashable, host: str, port: int) -> asyncio.Future[Sequence[str]]:
        """Return a look-up that has begun; it goes on if nobody waits for it.

        Waits while the key has its share. Safe to cancel until it returns.
        """
        await self._places.enter(key)
        lookup = asyncio.ensure_future(self._resolve(host, port))
        self._places.leave_after(lookup, key)
        return lookup
