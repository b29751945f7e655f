"""The event loop of a service: uvloop, with the news of gRPC heard together.

grpc.aio's own thread sends the event loop a byte for each thing that happened, and the loop takes one byte a
turn, though it sees all that has happened with the first. So it goes round again for each of the others, and where
its turns are long, bytes that nobody has read hold the thread up: no more than one thing a turn happens then.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import uvloop

_BYTES_MAX: Final = 4096
_GRPC_HANDLER: Final = "_handle_events"


class Loop(uvloop.Loop):
    """See the module."""

    def add_reader(  # type: ignore[override]  # typed with a variadic type variable, to no use here
        self, fd: Any, callback: Callable[..., Any], *args: Any
    ) -> None:
        """Call `callback` when there is something to read. For gRPC's own, read it all first: it looks at one byte."""
        if isinstance(fd, socket.socket) and _is_of_grpc(callback):
            callback = partial(_read_all, fd, callback)
        super().add_reader(fd, callback, *args)


def _is_of_grpc(callback: Callable[..., Any]) -> bool:
    return isinstance(callback, partial) and getattr(callback.func, "__name__", "") == _GRPC_HANDLER


def _read_all(news: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    # Two loops may share the socket, each in a thread of its own: what one has read the other does not find.
    with suppress(BlockingIOError):
        news.recv(_BYTES_MAX)
    callback(*args)
