"""Limits on a server's concurrent calls and streams: in total, per store and per user.

A call takes a slot after authentication and before its request is read. While gRPC reads a request, it buffers up to
the size limit, so the number of concurrent reads is limited. A request stream always has a pending read, and an idle
stream looks the same as one in the middle of a message. Therefore, each request stream counts as a whole message
against a byte budget.
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

# Options for both ends of a connection: pings keep proxies from closing it, and a dead connection ends within 30 s.
KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Otherwise a connection counts as alive for a minute without an answer.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_ARRIVING_MAX: Final = 64
_ARRIVING_PER_STORE_MAX: Final = 32
_ARRIVING_PER_USER_MAX: Final = 8
_ARRIVAL_SECONDS: Final = 10.0
_ANONYMOUS_PER_CONNECTION_MAX: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a server.

    For each kind of call, a store can use at most the fraction `store_share` of the slots, and a user at most the
    fraction `user_share`.
    """

    message_bytes_max: int = 4 * 1024 * 1024
    unary_calls_max: int = 1000
    streams_max: int = 1000
    store_share: float = 1.0
    user_share: float = 1.0
    request_stream_bytes_max: int = 1536 * 1024 * 1024

    @property
    def read_bytes_max(self) -> int:
        """The size at which gRPC refuses a message before reading it.

        It is slightly above the message limit, so that Pawl can refuse most oversized messages with its own reason.
        """
        return self.message_bytes_max * 9 // 8

    @property
    def request_streams_max(self) -> int:
        return max(1, self.request_stream_bytes_max // self.read_bytes_max)


class CallSlots:
    """Slots for calls of one kind.

    Calls from services count only towards the total, because a service acts for all users.
    """

    def __init__(self, noun: str, slots_max: int, limits: Limits) -> None:
        self._noun = noun
        self._max = {
            "server": slots_max,
            "store": max(1, int(slots_max * limits.store_share)),
            "user": max(1, int(slots_max * limits.user_share)),
        }
        self._taken: Counter[tuple[str, ...]] = Counter()

    def __len__(self) -> int:
        return self._taken[()]

    def take(self, principal: Principal) -> None:
        """Take a slot. The caller must release it later.

        Raises:
            Overloaded: No slot is free.
        """
        keys = _keys(principal)
        for scope, key in keys.items():
            if self._taken[key] >= self._max[scope]:
                raise Overloaded(f"{self._max[scope]} {self._noun}, which is the limit per {scope}: try again later")
        self._taken.update(keys.values())

    def release(self, principal: Principal) -> None:
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
    def end(self, reason: PawlError) -> None:
        """End the call. Its client receives `reason` as the error."""


class AnonymousCalls:
    """The running calls of open methods, which do not require authentication.

    At the limit, a new call ends the oldest call of the connection with the most calls, so no client can lock others
    out. A connection can have at most 32 calls.
    """

    def __init__(self, calls_max: int) -> None:
        self._calls_max = calls_max
        self._connections: dict[Endable, str] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._connections)

    def enter(self, call: Endable, connection: str) -> None:
        """Admit a call, ending another call if necessary."""
        if self._counts[connection] >= _ANONYMOUS_PER_CONNECTION_MAX:
            self._end_oldest(connection, _ANONYMOUS_PER_CONNECTION_MAX)
        elif len(self) >= self._calls_max:
            [(fullest, _)] = self._counts.most_common(1)
            self._end_oldest(fullest, self._calls_max)
        self._connections[call] = connection
        self._counts[connection] += 1

    def _end_oldest(self, connection: str, calls_max: int) -> None:
        oldest = next(one for one, its in self._connections.items() if its == connection)
        self.leave(oldest)
        oldest.end(Overloaded(f"{calls_max} calls without a key are already open: try again later"))

    def leave(self, call: Endable) -> None:
        """Remove a call. Idempotent."""
        connection = self._connections.pop(call, None)
        if connection is not None:
            self._counts[connection] -= 1
            if not self._counts[connection]:
                del self._counts[connection]


class Arrivals:
    """Limits on the number of requests being read: in total, per store and per user. Services are not limited."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(_ARRIVING_MAX)
        self._turns: dict[tuple[str, ...], asyncio.Semaphore] = {}
        self._callers: Counter[tuple[str, ...]] = Counter()

    async def read(self, context: Any, principal: Principal) -> bytes:
        """Return the single request of a call.

        Raises:
            DeadlineExceeded: The request did not arrive in time.
            MalformedRequest: The call has no request.
        """
        if principal.is_service:
            return await read_one(context)
        store, user = (principal.store_id,), (principal.store_id, principal.user_id)
        async with self._turn(user, _ARRIVING_PER_USER_MAX), self._turn(store, _ARRIVING_PER_STORE_MAX), self._all:
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
    """Return the single request of a call. Raises the same errors as `Arrivals.read`."""
    try:
        async with asyncio.timeout(_ARRIVAL_SECONDS):
            raw = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"the request did not arrive within {_ARRIVAL_SECONDS:g} s") from None
    if raw is grpc.aio.EOF:
        raise MalformedRequest("the call has no request")
    request: bytes = raw
    return request
