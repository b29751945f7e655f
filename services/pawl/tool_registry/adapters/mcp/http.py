"""Messages of MCP over streamable HTTP, through a client that knows where it may connect to."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import httpx2
from mcp.client.streamable_http import streamable_http_client

from pawl.chassis.clock import Clock
from pawl.tool_registry.adapters.mcp.pace import Paced, Streams, Wire
from pawl.tool_registry.adapters.mcp.program import BRACKETS_MAX, MESSAGE_BYTES_MAX, brackets_in

# A server may be silent for as long as a call may take, whose own limit ends it, and that stands still while the user
# is asked something, for days perhaps.
_EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_END_BYTES: Final = 3
_TIMEOUT: Final = httpx2.Timeout(30.0, read=None)


@asynccontextmanager
async def http_transport(
    client: httpx2.AsyncClient, url: str, headers: Mapping[str, str], wire: Wire, clock: Clock
) -> AsyncGenerator[Streams, None]:
    """Give the streams to a server; closes `client` at the end. `wire` is told of a body that is too large.

    Headers go to the origin of `url` only: the transport follows no redirect that leaves it.
    """
    client.headers.update(headers)
    # What is compressed could be any size when it is not.
    client.headers["Accept-Encoding"] = "identity"
    client.timeout = _TIMEOUT
    client.event_hooks = {**client.event_hooks, "response": [*client.event_hooks["response"], partial(_limit, wire)]}
    async with (
        client,
        streamable_http_client(url, http_client=client, max_sse_event_size=MESSAGE_BYTES_MAX) as (read, write),
    ):
        yield Paced(read, clock), write


async def _limit(wire: Wire, response: httpx2.Response) -> None:
    """Limit a body that is read as a whole, and the brackets of events. Those have a limit of bytes already."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise httpx2.DecodingError("it sent a compressed body, which nobody asked for", request=response.request)
    is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
    if isinstance(response.stream, httpx2.AsyncByteStream):
        response.stream = _Limited(response.stream, response.request, wire, is_stream=is_stream)


class _Limited(httpx2.AsyncByteStream):
    """A body whose one message, or each of whose events, is not too large."""

    def __init__(self, stream: httpx2.AsyncByteStream, request: httpx2.Request, wire: Wire, *, is_stream: bool) -> None:
        self._stream = stream
        self._is_stream = is_stream
        self._wire = wire
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = brackets = 0
        end = b""  # Of the data before: the end of an event may be cut in two.
        async for data in self._stream:
            size += 0 if self._is_stream else len(data)
            events = [brackets_in(part) for part in (_EVENT_END.split(end + data) if self._is_stream else [data])]
            events[0] += brackets
            brackets, end = events[-1], data[-_END_BYTES:]
            if size > MESSAGE_BYTES_MAX or max(events) > BRACKETS_MAX:
                problem = f"it sent a message of more than {MESSAGE_BYTES_MAX} bytes or {BRACKETS_MAX} brackets"
                self._wire.end(problem, is_too_large=True)
                raise httpx2.ReadError(problem, request=self._request)
            yield data

    async def aclose(self) -> None:
        await self._stream.aclose()
