"""The parts common to all transports of MCP: the streams, how fast a server may speak, and how it ended."""

from __future__ import annotations

import asyncio
from typing import Any, Final, Self, TypeAlias

import mcp.types
from mcp.shared.message import SessionMessage

from pawl.chassis.clock import Clock

# What nobody has asked for: requests and notifications of the server.
_UNASKED_BURST: Final = 1000
_UNASKED_PER_SECOND: Final = 200


class Wire:
    """The state of a transport. Its problem is empty while it goes on, and where its end was asked for."""

    def __init__(self) -> None:
        self.problem = ""
        self.is_too_large = False
        """True if it ended because a message was too large."""
        self.was_used = False
        """True if calls went over it: what the program wrote last may be about what somebody sent."""
        self.news = asyncio.Event()
        """Set when there is something to do: the end, or what its owner sets it for."""

    def end(self, problem: str, *, is_too_large: bool = False) -> None:
        """Say why; the first reason stays."""
        self.is_too_large = self.is_too_large or (is_too_large and not self.problem)
        self.problem = self.problem or problem
        self.news.set()


class Paced:
    """A stream of incoming messages that lets a server speak only so fast; what it says beyond that waits with it."""

    def __init__(self, stream: Any, clock: Clock) -> None:
        self._stream = stream
        self._clock = clock
        self._left = float(_UNASKED_BURST)
        self._seen_at = clock.monotonic()

    @property
    def last_context(self) -> Any:
        """The context of the sender of the last message, if the transport keeps it."""
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        return await self._passed(await self._stream.receive())

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return await self._passed(await self._stream.__anext__())

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> bool | None:
        handled: bool | None = await self._stream.__aexit__(*error)
        return handled

    async def _passed(self, item: SessionMessage | Exception) -> SessionMessage | Exception:
        unasked = mcp.types.JSONRPCRequest | mcp.types.JSONRPCNotification
        if isinstance(item, SessionMessage) and isinstance(item.message, unasked):
            await self._wait()
        return item

    async def _wait(self) -> None:
        now = self._clock.monotonic()
        self._left = min(self._left + (now - self._seen_at) * _UNASKED_PER_SECOND, _UNASKED_BURST)
        self._seen_at = now
        self._left -= 1
        if self._left < 0:
            await self._clock.sleep(-self._left / _UNASKED_PER_SECOND)


Streams: TypeAlias = tuple[Paced, Any]
"""From the server and to it."""
