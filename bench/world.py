"""The environment of a benchmark: the model server and Pawl."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from bench.subjects import Pawl
from pawl.launcher.services import STAGES, ServiceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Times at which a request arrived and its answer was sent, in seconds of the machine's monotonic clock."""

    arrived: float
    first_bytes: float
    first_output: float
    last_bytes: float


@dataclass(frozen=True, slots=True)
class ModelServer:
    """The model server at `url`, which sends canned responses."""

    url: str

    async def requests(self) -> list[Request]:
        """Return the requests answered since the last call, in order of arrival."""
        parts = urllib.parse.urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**26)
        try:
            writer.write(b"GET /times HTTP/1.1\r\nhost: model\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(maxsplit=1)[0])
            rows = json.loads(await reader.readexactly(length))
        finally:
            writer.close()
        found = [Request(arrived=a, first_bytes=b, first_output=c, last_bytes=d) for a, b, c, d in rows]
        return sorted(found, key=lambda request: request.arrived)


@asynccontextmanager
async def model_server(**options: float) -> AsyncIterator[ModelServer]:
    """Run the model server with these command-line options."""
    arguments = [f"--{name.replace('_', '-')}={value:g}" for name, value in options.items()]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.model", *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield ModelServer((await process.stdout.readline()).decode().strip())
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def scratch() -> AsyncIterator[Path]:
    """Yield an empty folder that PostgreSQL's account can traverse."""
    with tempfile.TemporaryDirectory(prefix="pawl-bench-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@asynccontextmanager
async def pawl(
    *,
    replicas: Mapping[str, int] = MappingProxyType({}),
    environment: Mapping[str, str] = MappingProxyType({}),
    is_split: bool = False,
    stages: tuple[tuple[ServiceSpec, ...], ...] = STAGES,
    **model: float,
) -> AsyncIterator[tuple[Pawl, ModelServer]]:
    """Run a new Pawl, with fsync, and its model server."""
    async with (
        scratch() as data,
        model_server(**model) as server,
        Pawl(
            data / "pawl", server.url, replicas=replicas, environment=environment, is_split=is_split, stages=stages
        ) as subject,
    ):
        yield subject, server
