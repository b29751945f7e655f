"""Limits on the calls and streams that a server holds at once: in all, per store and per user.

A place is taken when the caller is known and before a byte of the request is
read. The request itself waits in gRPC, up to its limit of size, from when it is
asked for until its last byte is there; so only so many are asked for at a time.
A stream of requests always asks for the next one, and nothing tells an idle stream
from one in the middle of a message: so each counts as a whole message, and a budget
of bytes says how many there may be.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc

from pawl.chassis.identity.auth import Principal
from pawl.errors import DeadlineExceeded, MalformedRequest, Overloaded, PawlError

KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Else a connection counts as alive for a minute without an answer.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Options of both ends of a connection: it pings before proxies close it, and a dead one ends within 30 s."""
_ARRIVING_MAX: Final = 64
_ARRIVING_OF_STORE_MAX: Final = 32
_ARRIVING_OF_ONE_MAX: Final = 8
_ARRIVAL_SECONDS: Final = 10.0
_STRANGERS_OF_ONE_MAX: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the calls that a server holds at once. The shares are of all limits, for one store and for one user."""

    message_bytes_max: int = 4 * 1024 * 1024
    unary_calls_max: int = 1000
    streams_max: int = 1000
    store_share: float = 1.0
    user_share: float = 1.0
    request_stream_bytes_max: int = 1536 * 1024 * 1024

    @property
    def read_bytes_max(self) -> int:
        """Return how large a message is read: a little over the limit, to be refused with a reason of ours.

        gRPC itself refuses larger ones before it reads them.
        """
        return self.message_bytes_max * 9 // 8

    @property
    def request_streams_max(self) -> int:
        """Return how many streams of requests may be open."""
        return max(1, self.request_stream_bytes_max // self.read_bytes_max)


class Places:
    """Places for calls of one kind. Services count in all only: they work for everybody."""

    def __init__(self, noun: str, places_max: int, limits: Limits) -> None:
        self._noun = noun
        self._max = {
            "server": places_max,
            "store": max(1, int(places_max * limits.store_share)),
            "user": max(1, int(places_max * limits.user_share)),
        }
        self._taken: Counter[tuple[str, ...]] = Counter()

    def __len__(self) -> int:
        return self._taken[()]

    def take(self, principal: Principal) -> None:
        """Take a place, to be given back.

        Raises:
            Overloaded: there is none.
        """
        keys = _keys(principal)
        for scope, key in keys.items():
            if self._taken[key] >= self._max[scope]:
                raise Overloaded(f"{self._max[scope]} {self._noun}, the limit of one {scope}: try again later")
        self._taken.update(keys.values())

    def give_back(self, principal: Principal) -> None:
        """Give back what was taken."""
        for key in _keys(principal).values():
            self._taken[key] -= 1
            if not self._taken[key]:
                del self._taken[key]


def _keys(principal: Principal) -> dict[str, tuple[str, ...]]:
    if principal.is_service:
        return {"server": ()}
    store_id, user_id = principal.store_id, principal.user_id
    return {"user": (store_id, user_id), "store": (store_id,), "server": ()}


class Endable(Protocol):
    """A call that can be told to end."""

    def end(self, reason: PawlError) -> None:
        """Have its client get `reason`, soon."""


class Crowd:
    """Calls of those who need not say who they are.

    For one more than there is room for, the oldest on the connection that has most
    ends: whoever holds many keeps nobody out. A connection has room for 32.
    """

    def __init__(self, calls_max: int) -> None:
        self._calls_max = calls_max
        self._connections: dict[Endable, str] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._connections)

    def enter(self, call: Endable, connection: str) -> None:
        """Let a call in, whatever that costs another one."""
        if self._counts[connection] >= _STRANGERS_OF_ONE_MAX:
            self._end_oldest(connection, _STRANGERS_OF_ONE_MAX)
        elif len(self) >= self._calls_max:
            [(fullest, _)] = self._counts.most_common(1)
            self._end_oldest(fullest, self._calls_max)
        self._connections[call] = connection
        self._counts[connection] += 1

    def _end_oldest(self, connection: str, calls_max: int) -> None:
        oldest = next(one for one, its in self._connections.items() if its == connection)
        self.leave(oldest)
        oldest.end(Overloaded(f"{calls_max} calls without a key are open here: try again later"))

    def leave(self, call: Endable) -> None:
        """Forget a call, if it is still here."""
        connection = self._connections.pop(call, None)
        if connection is not None:
            self._counts[connection] -= 1
            if not self._counts[connection]:
                del self._counts[connection]


class Arrivals:
    """Requests on their way in: so many in all, of one store and of one user; services come as they like."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(_ARRIVING_MAX)
        self._turns: dict[tuple[str, ...], asyncio.Semaphore] = {}
        self._callers: Counter[tuple[str, ...]] = Counter()

    async def read(self, context: Any, principal: Principal) -> bytes:
        """Return the one request of a call.

        Raises:
            DeadlineExceeded: it did not arrive in time.
            MalformedRequest: there is none.
        """
        if principal.is_service:
            return await read_one(context)
        store, user = (principal.store_id,), (principal.store_id, principal.user_id)
        async with self._turn(user, _ARRIVING_OF_ONE_MAX), self._turn(store, _ARRIVING_OF_STORE_MAX), self._all:
            return await read_one(context)

    @asynccontextmanager
    async def _turn(self, caller: tuple[str, ...], turns_max: int) -> AsyncIterator[None]:
        self._callers[caller] += 1
        try:
            async with self._turns.setdefault(caller, asyncio.Semaphore(turns_max)):
                yield
        finally:
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller], self._turns[caller]


async def read_one(context: Any) -> bytes:
    """Return the one request of a call; raises as `Arrivals.read` does."""
    try:
        async with asyncio.timeout(_ARRIVAL_SECONDS):
            raw = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"the request did not arrive within {_ARRIVAL_SECONDS:g} s") from None
    if raw is grpc.aio.EOF:
        raise MalformedRequest("the call has no request")
    request: bytes = raw
    return request
