"""The database crashes under load and comes back."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from pawl.errors import DependencyUnavailable
from pawl.event.v1 import event_pb2
from tests import servers
from tests.rpc.job_store.conftest import StartReplica
from tests.rpc.job_store.user import Owner, User


class Crashing:
    """A PostgreSQL of a test's own that can crash and come back."""

    def __init__(self, folder: Path, url: str) -> None:
        self._data = folder / "data"
        self.url = url

    def crash(self) -> None:
        """End it without a clean shutdown; returns when it is gone."""
        process = psutil.Process(int((self._data / "postmaster.pid").read_text().splitlines()[0]))
        process.send_signal(signal.SIGQUIT)
        process.wait(60)

    def start(self) -> None:
        """Start it again. What is left of the crashed server can be in the way for a moment."""
        server = servers.postgres_server(self._data)
        give_up = time.monotonic() + 60
        while True:
            try:
                return server.ensure_postgres_running()
            except (subprocess.SubprocessError, AssertionError):
                assert time.monotonic() < give_up, "PostgreSQL does not start again"


@pytest.fixture
def crashing(tmp_path: Path) -> Iterator[Crashing]:
    with servers.postgres(tmp_path) as url:
        yield Crashing(tmp_path, url)


@pytest.fixture
async def database_url(crashing: Crashing) -> str:
    """In this file, the job stores use the server that crashes, and that waits for its log as in production."""
    admin = await asyncpg.connect(crashing.url)
    await admin.execute("ALTER SYSTEM SET synchronous_commit = on")
    await admin.execute("SELECT pg_reload_conf()")
    await admin.close()
    return crashing.url


async def test_what_was_acknowledged_survives_a_crash_of_the_database(crashing: Crashing, start: StartReplica) -> None:
    """I1, I2: each step is in the log once, however often its owner had to ask."""
    user = User((await start()).stub)
    owners = [await user.start(conversation_id=f"c{number}") for number in range(4)]
    crashed = asyncio.Event()

    async def drive(owner: Owner) -> int:
        steps = 0
        refusals = 0
        while steps < 20 or not crashed.is_set() or not refusals:
            delta = event_pb2.OutputDelta(text=str(steps))
            try:
                await owner.commit(f"step_{steps:06}", events=[event_pb2.RunEvent(output_delta=delta)])
            except DependencyUnavailable:
                refusals += 1
                await asyncio.sleep(0.05)
            else:
                steps += 1
        return steps

    async with asyncio.TaskGroup() as driving:
        tasks = [driving.create_task(drive(owner)) for owner in owners]
        await asyncio.to_thread(crashing.crash)
        crashed.set()
        await asyncio.to_thread(crashing.start)
    steps = [task.result() for task in tasks]
    for owner, count_of_steps in zip(owners, steps, strict=True):
        events = await user.events(owner.run_id)
        texts = [event.output_delta.text for event in events if event.type == "output.delta"]
        assert texts == [str(number) for number in range(count_of_steps)]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
