"""The body of a successful response, read the same way whoever fetched it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import httpx2

from pawl.agent_loop.model import failure
from pawl.agent_loop.model.connection import Connection
from pawl.agent_loop.model.pool import Pool
from pawl.agent_loop.model.request import ModelError


class Response(Protocol):
    """A response whose head is there."""

    async def read(self, *, until: float) -> bytes | None:
        """Return what came of the body, or None at its end. `until` is a time of the loop's clock.

        Raises:
            TimeoutError: nothing came up to then.
            ModelError: STREAM_TRUNCATED, STREAM_GARBLED or NETWORK.
        """

    async def close(self) -> None:
        """Leave the connection for the next call if the body was read to its end; close it if not."""


class DirectResponse:
    """The bytes of a connection as they are."""

    def __init__(self, connection: Connection, pool: Pool) -> None:
        self.read = connection.read
        self._connection = connection
        self._pool = pool

    async def close(self) -> None:
        self._pool.give(self._connection)


class HttpxResponse:
    """A body as httpx2 reads it: it takes encodings off."""

    def __init__(self, response: httpx2.Response) -> None:
        self._response = response
        self._chunks = response.aiter_bytes()

    async def read(self, *, until: float) -> bytes | None:
        try:
            async with asyncio.timeout_at(until):
                return await anext(self._chunks, None)
        except httpx2.RemoteProtocolError:
            raise ModelError(failure.TRUNCATED) from None
        except httpx2.DecodingError:
            raise ModelError(failure.garbled()) from None
        except httpx2.HTTPError:
            raise ModelError(failure.NETWORK) from None

    async def close(self) -> None:
        await self._chunks.aclose()
        await self._response.aclose()


class DirectStream(httpx2.AsyncByteStream):
    """The bytes of a connection, for httpx2 to decode."""

    def __init__(self, connection: Connection, pool: Pool) -> None:
        self._connection = connection
        self._pool = pool

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (data := await self._connection.read()) is not None:
            yield data

    async def aclose(self) -> None:
        self._pool.give(self._connection)
