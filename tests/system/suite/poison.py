"""A model server in whose hands workers die: it passes requests on, and kills whoever asks about poison."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

POISON: Final = "deadly-poison"

_CHUNK_BYTES: Final = 65_536


class PoisonousModel:
    """Stands in front of a model server. `workers` gives the process ids of those who may be killed.

    `antidote` ends the killing: from then on poison is answered as all else is.
    """

    def __init__(self, workers: Callable[[], Sequence[int]]) -> None:
        self._workers = workers
        self._port = 0
        self._host, self._model_port = "", 0
        self._pipes: set[asyncio.Task[None]] = set()
        self.antidote = False
        self.killed_count = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for pipe in self._pipes:
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)

    @property
    def base_url(self) -> str:
        """What a worker takes for its model server."""
        return f"http://127.0.0.1:{self._port}/v1"

    def pass_on_to(self, base_url: str) -> None:
        """Say where the real one is."""
        self._host, _, port = base_url.removeprefix("http://").removesuffix("/v1").partition(":")
        self._model_port = int(port)

    async def _serve(self, asking: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._model_port)
        pipes = [
            asyncio.create_task(self._pass_requests(asking, writer, answer.get_extra_info("peername")[1])),
            asyncio.create_task(_pass(reader, answer)),
        ]
        self._pipes.update(pipes)
        await asyncio.wait(pipes)
        self._pipes.difference_update(pipes)

    async def _pass_requests(self, asking: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        seen = b""
        try:
            while chunk := await asking.read(_CHUNK_BYTES):
                seen = (seen + chunk)[-_CHUNK_BYTES:]
                if POISON.encode() in seen and not self.antidote:
                    self._kill(port)
                    return
                writer.write(chunk)
                await writer.drain()
        except OSError:
            return
        finally:
            writer.close()

    def _kill(self, port: int) -> None:
        """Kill the worker at the other end of a connection from its port."""
        for pid in self._workers():
            if _socket(pid, port, self._port) in _open_files(pid):
                os.kill(pid, signal.SIGKILL)
                self.killed_count += 1


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
    except OSError:
        return
    finally:
        writer.close()


def _socket(pid: int, local_port: int, remote_port: int) -> str:
    """Return how a process would name its end of a connection."""
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        ports = [int(address.partition(":")[2], 16) for address in columns[1:3]]
        if ports == [local_port, remote_port]:
            return f"socket:[{columns[9]}]"
    return ""


def _open_files(pid: int) -> set[str]:
    files = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            files.add(str(path.readlink()))
        except FileNotFoundError:
            continue  # Closed meanwhile.
    return files
