"""`python -m bench.recovery`: the time until all runs continue after all processes were killed.

`pawl up` with default settings and two replicas of each service works on 200 runs, half of them in a tool call and half
in a model answer. Then SIGKILL ends the launcher and all its processes, including PostgreSQL and NATS, and `pawl up`
starts again. The measured time ends when the next owner of every run has committed a step to the run's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import msgspec
import psutil

from pawl.agent.v1 import agent_pb2, agent_pb2_grpc
from pawl.chassis.rpc.replicas import Endpoints, read_endpoints
from pawl.event.v1 import run_pb2
from tests.chaos.caller import Metadata, Stub
from tests.chaos.prompts import call
from tests.chaos.tools import FILE_VARIABLE
from tests.chaos.world import REPLICAS, SERVICES
from tests.keys import LOCAL_KEY, keyed_channel
from tests.poll import until
from tests.simulation.record import run_state, seconds

A = TypeVar("A")
B = TypeVar("B")

GOAL_SECONDS = 15.0

# As many active runs as the default settings allow per store and user.
_STORES, _USERS, _RUNS_PER_USER = 10, 4, 5
_AT_ONCE = 16
_PATIENCE_SECONDS = 90.0
_STREAMING = "count to 200 very slowly"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    runs: int
    processes_killed: int
    ready_seconds: float
    first_step_seconds: float
    median_step_seconds: float
    last_step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Active:
    metadata: Metadata
    run: run_pb2.Run


async def measure(folder: Path, report: Callable[[str], None]) -> Recovery:
    """Measure in an empty folder.

    Raises:
        TimeoutError: a process was not ready, or a run did not continue, within a minute and a half.
    """
    async with _up(folder) as (process, endpoints), _agents(endpoints) as stubs:
        started = await _start_runs(stubs)
        active = await _each(partial(_active, stubs), started)
        report(f"{len(active)} runs are active")
        killed = await _kill_everything(process.pid)
    report(f"{killed} processes are killed")
    begin_time = time.time()
    async with _up(folder) as (_, endpoints), _agents(endpoints) as stubs:
        ready_seconds = time.time() - begin_time
        report(f"everything is ready again after {ready_seconds:.1f} s")
        steps = await _each(partial(_step_time, stubs, begin_time), active)
    after = [step - begin_time for step in steps]
    return Recovery(
        runs=len(active),
        processes_killed=killed,
        ready_seconds=round(ready_seconds, 1),
        first_step_seconds=round(min(after), 1),
        median_step_seconds=round(statistics.median(after), 1),
        last_step_seconds=round(max(after), 1),
    )


@asynccontextmanager
async def _up(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, Endpoints]]:
    """Run `pawl up` on a data folder, and yield its endpoints when every process is ready."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PAWL_", "OPENAI_"))}
    environment |= {
        "PAWL_LOCAL_KEY": LOCAL_KEY,
        "PAWL_TOOL_ENVIRONMENT": FILE_VARIABLE,
        "PAWL_TOOLS": "tests.chaos.tools",
        FILE_VARIABLE: str(folder / "effects.jsonl"),
    }
    replicas = [f"--replicas={service}={REPLICAS}" for service in SERVICES]
    command = [sys.executable, "-m", "pawl.cli", f"--data={folder / 'data'}", "up", "--port=all=0", *replicas]
    with (folder / "up.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
    found: list[Endpoints] = []

    async def is_ready() -> bool:
        endpoints = read_endpoints(folder / "data")
        if endpoints is None or endpoints.launcher_pid != process.pid:
            return False
        found[:] = [endpoints]
        replicas = [replica for service in SERVICES for replica in endpoints.services.get(service, [])]
        return len(replicas) == REPLICAS * len(SERVICES) and all(replica.ready for replica in replicas)

    try:
        await until(is_ready, patience_seconds=_PATIENCE_SECONDS)
        yield process, found[0]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def _agents(endpoints: Endpoints) -> AsyncIterator[Sequence[Stub]]:
    channels = [keyed_channel(address) for address in endpoints.addresses("agent-loop")]
    try:
        yield [agent_pb2_grpc.AgentServiceStub(channel) for channel in channels]
    finally:
        for channel in channels:
            await channel.close()


async def _start_runs(stubs: Sequence[Stub]) -> list[_Active]:
    async def start(number: int) -> _Active:
        place = number // _RUNS_PER_USER
        metadata = (("pawl-store", f"store-{place // _USERS}"), ("pawl-user", f"user-{place % _USERS}"))
        tools = [call("set_valve", tag=f"{number}-{stage}", seconds=5.0) for stage in range(9)]
        text = " then ".join(tools) if number % 2 else _STREAMING
        request = agent_pb2.StartRunRequest(request_id=f"start-{number}", text=text)
        return _Active(metadata=metadata, run=(await stubs[number % REPLICAS].StartRun(request, metadata=metadata)).run)

    return await _each(start, range(_STORES * _USERS * _RUNS_PER_USER))


async def _active(stubs: Sequence[Stub], started: _Active) -> _Active:
    """Return the run once it is running a call or an answer."""
    found: list[run_pb2.Run] = []

    async def is_active() -> bool:
        request = agent_pb2.GetRunRequest(run_id=started.run.run_id)
        found[:] = [(await stubs[0].GetRun(request, metadata=started.metadata)).run]
        return run_state(found[0].state) == "RUNNING" and found[0].round > 0

    await until(is_active, patience_seconds=_PATIENCE_SECONDS)
    return _Active(metadata=started.metadata, run=found[0])


async def _kill_everything(launcher_pid: int) -> int:
    """Kill the launcher and all its processes at the same time. Return the number of processes."""
    launcher = psutil.Process(launcher_pid)
    processes = [launcher, *launcher.children(recursive=True)]
    for process in processes:
        # PostgreSQL's child processes end automatically after it is killed, so they may already be gone.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

    async def are_gone() -> bool:
        return not any(_is_alive(process) for process in processes)

    await until(are_gone)
    return len(processes)


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def _step_time(stubs: Sequence[Stub], begin_time: float, active: _Active) -> float:
    """Return the time at which the run's next owner first wrote to the log."""
    request = agent_pb2.WatchRunRequest(run_id=active.run.run_id, after_seq=active.run.last_seq)
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while True:
            try:
                async for answer in stubs[0].WatchRun(request, metadata=active.metadata):
                    for event in answer.events:
                        if event.attempt > active.run.epoch and seconds(event) > begin_time:
                            return seconds(event)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.1)


async def _each(work: Callable[[A], Awaitable[B]], items: Sequence[A]) -> list[B]:
    """Call `work` for each item with limited concurrency."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def bounded(item: A) -> B:
        async with gate:
            return await work(item)

    return await asyncio.gather(*(bounded(item) for item in items))


def main() -> int:
    """Measure in a temporary folder. Return 1 if the last run took longer than the target."""
    with tempfile.TemporaryDirectory(prefix="pawl-recovery-") as folder:
        found = asyncio.run(measure(Path(folder), print))
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
    return 1 if found.last_step_seconds > GOAL_SECONDS else 0


if __name__ == "__main__":
    sys.exit(main())
