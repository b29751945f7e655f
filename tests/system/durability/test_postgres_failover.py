"""Two PostgreSQL servers with synchronous replication: the first is killed under load, the second is promoted.

Nothing acknowledged is lost, and the services continue without a restart. Afterwards pg_rewind makes the first server a
replica of the second.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import asyncpg
import pytest

from pawl.chassis.process.tasks import end
from pawl.client import AsyncClient
from pawl.event.v1 import run_pb2
from pawl.launcher.folder import SecretFiles
from pawl.launcher.options import SuiteOptions
from pawl.launcher.ports import free_port
from pawl.launcher.postgres import Postgres
from pawl.launcher.processes import shim
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.poll import until
from tests.servers import open_folder

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
_RUNS = 12  # before the server is killed, and after
_CONCURRENT = 3
_RUN_COUNT = "SELECT count(*) FROM job_store.runs"


@dataclass
class Server:
    """A server that runs as long as the test does, unless it is killed. Use as an asynchronous context manager."""

    postgres: Postgres
    process: asyncio.subprocess.Process | None = field(default=None, init=False)

    @property
    def admin(self) -> str:
        """The URL of the superuser."""
        password = self.postgres.secrets.get("postgres-superuser")
        return f"postgresql://postgres:{password}@127.0.0.1:{self.postgres.port}/postgres"

    async def run(self, program: str, *arguments: str) -> None:
        """Run a program of PostgreSQL with the server's account, until it ends."""
        done = await self._execute(program, *arguments)
        output, _ = await done.communicate()
        assert done.returncode == 0, output.decode()

    async def __aenter__(self) -> Self:
        command = self.postgres.spec().command()
        program, *arguments = command.arguments
        self.process = await self._execute(Path(program).name, *arguments, "-c", "log_min_messages=panic")
        await until(lambda: self.ask("SELECT 1"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process and self.process.returncode is None:
            await self.end(signal.SIGINT)

    async def end(self, number: signal.Signals) -> None:
        assert self.process
        self.process.send_signal(number)
        await self.process.wait()

    async def ask(self, statement: str, database: str = "postgres") -> object:
        """Return the first value of a statement, or None while the server is unavailable."""
        try:
            connection = await asyncpg.connect(self.admin, database=database)
        except (OSError, asyncpg.PostgresError):
            return None
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    async def _execute(self, program: str, *arguments: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *shim(self.postgres.account, signal.SIGKILL),
            str(self.postgres.programs / program),
            *arguments,
            cwd=self.postgres.folder.parent,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )


def server(folder: Path, name: str) -> Server:
    """Return a server with the passwords that all of them have."""
    (folder / name).mkdir(mode=0o777)
    (folder / name).chmod(0o777)  # PostgreSQL's account creates the cluster.
    return Server(Postgres(folder=folder / name / "data", port=free_port(), secrets=SecretFiles(folder / "secrets")))


async def test_promotion_under_load_loses_nothing_acknowledged() -> None:
    with open_folder() as folder:
        first, second = server(folder, "first"), server(folder, "second")
        await first.postgres.prepare()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(first)
            await until(first.postgres.spec().probe)  # creates the database and its roles
            data = str(second.postgres.folder)
            await first.run("pg_basebackup", "-d", first.admin, "-D", data, "-R", "--checkpoint=fast")
            await stack.enter_async_context(second)
            await first.ask("ALTER SYSTEM SET synchronous_standby_names = '*'")
            await first.ask("ALTER SYSTEM SET wal_keep_size = '256MB'")  # pg_rewind reads it.
            await first.ask("SELECT pg_reload_conf()")
            await until(lambda: first.ask("SELECT true FROM pg_stat_replication WHERE sync_state = 'sync'"))
            hosts = f"127.0.0.1:{first.postgres.port},127.0.0.1:{second.postgres.port}"
            user = first.postgres.url.partition("@")[0]
            url = f"{user}@{hosts}/pawl?target_session_attrs=read-write"
            options = SuiteOptions(data=folder / "data", database_url=url, local_key=LOCAL_KEY)
            suite = await stack.enter_async_context(Suite(options))
            agent_loop = suite.endpoints.services["agent-loop"][0].grpc
            pawl = AsyncClient([agent_loop], api_key=LOCAL_KEY, retry_seconds=240.0)
            await _lose_the_first(first, second, await stack.enter_async_context(pawl))
            await _rejoin(first, second)


async def _lose_the_first(first: Server, second: Server, pawl: AsyncClient) -> None:
    started: list[str] = []
    load = [asyncio.create_task(_start_runs(pawl, started)) for _ in range(_CONCURRENT)]
    await until(lambda: len(started) >= _RUNS)
    await first.end(signal.SIGKILL)
    acknowledged = list(started)
    assert await second.ask("SELECT pg_promote()") is True
    await until(lambda: len(started) >= len(acknowledged) + _RUNS)
    await end(load)
    for run_id in started:
        assert (await pawl.result(run_id)).state == run_pb2.RUN_STATE_COMPLETED


async def _start_runs(pawl: AsyncClient, started: list[str]) -> None:
    """Start runs one after another. Each is noted once it is acknowledged."""
    while True:
        run = await pawl.start("what is 17 * 23?")
        started.append(run.run_id)
        assert [piece async for piece in pawl.text(run.run_id)]


async def _rejoin(first: Server, second: Server) -> None:
    """Make the lost server a replica of the promoted one, without its writes that nobody acknowledged."""
    folder = first.postgres.folder
    await first.run("pg_rewind", "-D", str(folder), "--source-server", second.admin, "-R")
    async with first:
        await until(lambda: second.ask("SELECT true FROM pg_stat_replication WHERE state = 'streaming'"))
        assert await first.ask("SELECT pg_is_in_recovery()") is True
        runs = await second.ask(_RUN_COUNT, database="pawl")

        async def has_all_runs() -> bool:
            return await first.ask(_RUN_COUNT, database="pawl") == runs

        await until(has_all_runs)
