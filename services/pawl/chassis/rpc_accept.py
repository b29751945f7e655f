"""A gRPC server that takes in several calls of a method at once.

grpc.aio asks for the next call of a method once it has the one before, which takes five turns of
the event loop. Where a turn takes 2 ms, because other work is done in it, that is 100 calls of a
method a second; with eight asked for at once it is 1,000. For this the server asks ahead
(`AioServer._make_request_call_future` is where grpc.aio asks); should a version of grpc.aio ask
elsewhere, calls are taken in one by one again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, Final, Self, cast

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server as aio_server

ASKED_AHEAD: Final = 8
"""So many calls of a method are asked for at once."""


def server(interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]) -> grpc.aio.Server:
    """Return a server that asks ahead for the calls of a method, once it has had one."""
    return cast("grpc.aio.Server", _Server(tuple(interceptors), tuple(options)))


class _Server(aio_server.Server):
    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _AskingAhead(self._loop, None, (), interceptors, options, None)


class _AskingAhead(cygrpc.AioServer):  # type: ignore[misc]  # grpc has no types
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lines: dict[bytes | None, _Line] = {}

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """Return the next call of a method; None for all methods that it does not know."""
        ask = super()._make_request_call_future
        line = self._lines.get(method)
        if line is None:
            line = self._lines[method] = _Line(lambda: ask(method))
        return line.next()

    async def _server_main_loop(self, started: asyncio.Future[bool]) -> None:
        """Take in calls until the server ends. Those that have come by then and go to nobody end at once."""
        try:
            await super()._server_main_loop(started)
        finally:
            for line in self._lines.values():
                line.end()


class _Line:
    """The calls of one method in the order in which they came."""

    def __init__(self, ask: Callable[[], asyncio.Task[Any]]) -> None:
        self._ask = ask
        self._asked: set[asyncio.Task[Any]] = set()
        self._arrived: deque[asyncio.Task[Any]] = deque()
        self._next: _Next | None = None
        self._asked_max = 1
        self._has_ended = False

    def next(self) -> _Next:
        """Return the next call, to be waited for before this is called again."""
        while len(self._asked) < self._asked_max:
            asked = self._ask()
            self._asked.add(asked)
            asked.add_done_callback(self._take)
        # A method that nobody calls is asked for once.
        self._asked_max = ASKED_AHEAD
        self._next = _Next()
        if self._arrived:
            self._next.answer(self._arrived.popleft())
            self._next.is_there = True
        return self._next

    def end(self) -> None:
        """Let go of the calls that have come, and of those that still come: gRPC ends a call that nobody holds."""
        self._has_ended = True
        self._next = None
        self._arrived.clear()

    def _take(self, asked: asyncio.Task[Any]) -> None:
        self._asked.discard(asked)
        if asked.cancelled():
            return
        # Said to be known: when the server ends, all that was asked for fails.
        asked.exception()
        if self._has_ended:
            return
        if self._next is None or self._next.done():
            self._arrived.append(asked)
        else:
            self._next.answer(asked)


class _Next(asyncio.Future[Any]):
    """A call to come. Who first waits for one that is there goes on at once, not in a later turn of the event loop."""

    is_there = False

    def add_done_callback(self, fn: Callable[[Self], object], /, *, context: Context | None = None) -> None:
        if self.is_there:
            self.is_there = False
            fn(self)
        else:
            super().add_done_callback(fn, context=context)

    def answer(self, asked: asyncio.Task[Any]) -> None:
        """Be what was asked for."""
        error = asked.exception()
        if error is None:
            self.set_result(asked.result())
        else:
            self.set_exception(error)
            # It is of no interest to a server that has ended.
            self.exception()
