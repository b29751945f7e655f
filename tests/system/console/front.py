"""What stands before several gateways: one address, whose connections go to whichever replica takes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def front(addresses: Sequence[str]) -> AsyncIterator[str]:
    """Serve one address before `addresses`, each `host:port`, and give its URL: replicas that are there take turns."""
    turn = 0

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        nonlocal turn
        turn += 1
        for replica in range(len(addresses)):
            host, _, port = addresses[(turn + replica) % len(addresses)].rpartition(":")
            with suppress(OSError):
                return await asyncio.open_connection(host, int(port))
        raise ConnectionRefusedError("no gateway is there")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await connect()
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while content := await reader.read(64 * 1024):
            writer.write(content)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
