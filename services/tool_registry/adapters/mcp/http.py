"""Messages of MCP over streamable HTTP, through a client that knows where it may connect to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import httpx2
from mcp.client.streamable_http import streamable_http_client

from services.tool_registry.adapters.mcp.pace import Paced, Pacer, Streams, Wire
from services.tool_registry.adapters.mcp.program import MESSAGE_BYTES_MAX

# A server may be silent for as long as a call may take, whose own limit ends it, and that stands still while the user
# is asked something, for days perhaps.
_TIMEOUT: Final = httpx2.Timeout(30.0, read=None)


@asynccontextmanager
async def http_transport(
    client: httpx2.AsyncClient, url: str, headers: Mapping[str, str], wire: Wire, pacer: Pacer
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
        yield Paced(read, pacer), write


async def _limit(wire: Wire, response: httpx2.Response) -> None:
    """Limit a body that is read as a whole. Those of streams are limited event by event."""
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise httpx2.DecodingError("it sent a compressed body, which nobody asked for", request=response.request)
    is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
    if not is_stream and isinstance(response.stream, httpx2.AsyncByteStream):
        response.stream = _Limited(response.stream, response.request, wire)


class _Limited(httpx2.AsyncByteStream):
    """A body of at most MESSAGE_BYTES_MAX."""

    def __init__(self, stream: httpx2.AsyncByteStream, request: httpx2.Request, wire: Wire) -> None:
        self._stream = stream
        self._wire = wire
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for data in self._stream:
            size += len(data)
            if size > MESSAGE_BYTES_MAX:
                problem = f"it sent a message of more than {MESSAGE_BYTES_MAX} bytes"
                self._wire.end(problem, is_too_large=True)
                raise httpx2.ReadError(problem, request=self._request)
            yield data

    async def aclose(self) -> None:
        await self._stream.aclose()
