"""P7: the cost of many idle `Session` streams and parked runs."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import asyncpg
import grpc
import uvloop

from bench.copies import copied_id, copied_store, copy_conversation
from bench.figures import Figure, NotMeasured
from bench.processes import cpu_seconds, resident_mib
from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.chassis.rpc.client import open_channel
from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests.service import stages

STREAMS: Final = 2000
STREAMS_MIB_MAX: Final = 120.0
PARKED_MIB_MAX: Final = 1.0
_STORES: Final = 1000
USER: Final = "user-0"
_HEARTBEAT_SECONDS: Final = 10.0
_OPENING_MAX: Final = 50
_WARM_RUNS: Final = 50
_DEADLINE_SECONDS: Final = 120.0
_KEY_VARIABLE: Final = "PAWL_BENCH_KEY"
_HELD: Final = re.compile(r"^pawl_agent_loop_runs_held(?:\{.*\})? (\S+)$", re.MULTILINE)


# The idle clients, in a separate process.


async def crowd(address: str, streams: int, per_connection: int) -> None:
    """Hold `streams` idle sessions open, each for a separate client, until standard input ends.

    Print a line once all sessions are open and, at the end, the number of sessions that are still open.
    """
    channels: list[grpc.aio.Channel] = []
    opening = asyncio.Semaphore(_OPENING_MAX)
    sessions = []
    for number in range(streams):
        if number % per_connection == 0:
            # Otherwise all channels to one address would share a connection.
            channels.append(grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]))
        sessions.append(_Session(AgentServiceStub(channels[-1]), number))
    await asyncio.gather(*(session.open(opening) for session in sessions))
    tasks = [asyncio.create_task(part) for session in sessions for part in (session.live(), session.listen())]
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(sum(session.is_open for session in sessions), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(channel.close() for channel in channels))


class _Session:
    """A client that only sends heartbeats."""

    def __init__(self, stub: Any, number: int) -> None:
        self._stub = stub
        self._metadata = (("authorization", f"Bearer {os.environ[_KEY_VARIABLE]}"),)
        self._number = number
        self._call: Any = None
        self.is_open = False

    async def open(self, opening: asyncio.Semaphore) -> None:
        hello = session_pb2.Hello(client_id=f"idle-{self._number}", calls_max=1)
        async with opening:
            self._call = self._stub.Session(metadata=self._metadata)
            await self._call.write(session_pb2.SessionRequest(frame_id="f0", hello=hello))
            answer = await self._call.read()
        if answer is grpc.aio.EOF or not answer.HasField("welcome"):
            raise RuntimeError(f"session {self._number} was not welcomed: {answer}")
        self.is_open = True

    async def live(self) -> None:
        """Send heartbeats at the required interval, but not at the same time as other clients."""
        await asyncio.sleep(_HEARTBEAT_SECONDS * (self._number % 100) / 100)
        for frame in itertools.count(1):
            heartbeat = session_pb2.ClientHeartbeat()
            await self._call.write(session_pb2.SessionRequest(frame_id=f"f{frame}", heartbeat=heartbeat))
            await asyncio.sleep(_HEARTBEAT_SECONDS)

    async def listen(self) -> None:
        try:
            while await self._call.read() is not grpc.aio.EOF:
                pass
        finally:
            self.is_open = False


@asynccontextmanager
async def _crowd(address: str, key: str, streams: int, per_connection: int) -> AsyncIterator[None]:
    """Hold `streams` sessions open. Raise RuntimeError at the end if any of them was closed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.crowds", address, str(streams), str(per_connection)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {_KEY_VARIABLE: key},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_DEADLINE_SECONDS):
            if await process.stdout.readline() != b"open\n":
                raise RuntimeError("the sessions could not be opened")
        yield
        process.stdin.close()
        async with asyncio.timeout(_DEADLINE_SECONDS):
            left = int(await process.stdout.readline())
        if left != streams:
            raise RuntimeError(f"{streams - left} of {streams} idle sessions were closed")
    finally:
        process.stdin.close()
        await process.wait()


# The suite.


def roomy_suite(data: Path) -> Suite:
    """Return a suite with the scripted model, whose limits allow this many clients."""
    return Suite(
        SuiteOptions(
            data=data,
            environment={"PAWL_LOG_LEVEL": "warning"},
            stages=stages(
                agent_loop={
                    "streams_max": 2 * STREAMS,
                    "request_stream_bytes_max": 2 * STREAMS * 2 * 1024 * 1024,
                    "store_share": 1.0,
                    "user_share": 1.0,
                }
            ),
        )
    )


def _processes(suite: Suite) -> dict[str, int]:
    names = ("agent-loop", "job-store", "postgres")
    return {name: pid for name in names if (pid := suite.pid(name)) is not None}


def _agent_loop_mib(suite: Suite) -> float:
    return sum(resident_mib({"agent-loop": _processes(suite)["agent-loop"]}).values())


async def _idle(suite: Suite, seconds: float) -> dict[str, float]:
    """Wait, and return the CPU time of each process in milliseconds per second."""
    before = cpu_seconds(_processes(suite))
    await asyncio.sleep(seconds)
    after = cpu_seconds(_processes(suite))
    return {name: (after[name] - before[name]) / seconds * 1000 for name in after}


class _User:
    def __init__(self, agents: Any, store_id: str) -> None:
        self._agents = agents
        self._metadata = (("pawl-store", store_id), ("pawl-user", USER))

    async def start(self, text: str) -> run_pb2.Run:
        request = agent_pb2.StartRunRequest(text=text)
        run: run_pb2.Run = (await self._agents.StartRun(request, metadata=self._metadata)).run
        return run

    async def until(self, run_id: str, state: run_pb2.RunState.ValueType) -> run_pb2.Run:
        """Wait until a run is in this state, and return the run."""
        async with asyncio.timeout(_DEADLINE_SECONDS):
            while True:
                request = agent_pb2.GetRunRequest(run_id=run_id)
                run: run_pb2.Run = (await self._agents.GetRun(request, metadata=self._metadata)).run
                if run.state == state:
                    return run
                await asyncio.sleep(0.02)

    async def answer(self, run: run_pb2.Run) -> None:
        decision = types_pb2.CallDecision(
            run_id=run.run_id, call_id=run.pending_calls[0].call_id, kind=call_pb2.DECISION_KIND_ANSWER, answer="Yes"
        )
        request = agent_pb2.DecideRequest(run_id=run.run_id, decision=decision)
        await self._agents.Decide(request, metadata=self._metadata)


@asynccontextmanager
async def acting(suite: Suite, store_id: str) -> AsyncIterator[_User]:
    address = suite.endpoints.addresses("agent-loop")[0]
    async with open_channel(address, service_key=suite.local_key, deadline_seconds=_DEADLINE_SECONDS) as channel:
        yield _User(AgentServiceStub(channel), store_id)


async def warm(suite: Suite) -> None:
    """Use all parts once before memory is measured."""
    async with acting(suite, "warm") as user:
        for _ in range(_WARM_RUNS):
            await user.until((await user.start("what is 17 * 23")).run_id, run_pb2.RUN_STATE_COMPLETED)


# Idle sessions.


async def _streams(suite: Suite, per_connection: int, seconds: float) -> dict[str, float]:
    """Return the cost of idle sessions in a new agent-loop: memory in MiB, and CPU time in milliseconds per second."""
    await suite.stop_process("agent-loop")
    await suite.start_process("agent-loop")
    await warm(suite)
    address = suite.endpoints.addresses("agent-loop")[0]
    before = _agent_loop_mib(suite)
    async with _crowd(address, suite.local_key, STREAMS, per_connection):
        cpu = await _idle(suite, seconds)
        after = _agent_loop_mib(suite)
    return {"before": before, "growth": after - before, "cpu": cpu["agent-loop"]}


async def _idle_sessions(suite: Suite, *, quick: bool) -> Figure:
    seconds = 12.0 if quick else 60.0
    alone = await _streams(suite, 1, seconds)
    together = await _streams(suite, 100, seconds)
    return Figure(
        code="P7",
        what=f"memory of agent-loop for {STREAMS:,} idle Session streams, each on its own connection",
        value=alone["growth"],
        unit="MiB",
        target=f"at most {STREAMS_MIB_MAX:.0f} MiB",
        met=alone["growth"] <= STREAMS_MIB_MAX,
        detail={
            "before them, MiB": alone["before"],
            "a stream, KiB": alone["growth"] * 1024 / STREAMS,
            "CPU, ms a second": alone["cpu"],
            "with 100 streams per connection, MiB": together["growth"],
            "CPU with 100 streams per connection, ms/s": together["cpu"],
        },
    )


# Parked runs.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    agent_loop_mib: float
    runs_held: float
    cpu: Mapping[str, float]


async def _sample(suite: Suite, seconds: float) -> _Seen:
    cpu = await _idle(suite, seconds)
    url = f"http://{suite.endpoints.services['agent-loop'][0].metrics}/metrics"
    page = await asyncio.to_thread(_read, url)
    held = _HELD.search(page)
    if held is None:
        raise RuntimeError("agent-loop does not report how many runs it holds")
    return _Seen(agent_loop_mib=_agent_loop_mib(suite), runs_held=float(held[1]), cpu=cpu)


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310  # one of our services
        page: bytes = response.read()
    return page.decode()


async def _parked_runs(suite: Suite, *, quick: bool) -> Figure:
    runs, seconds = (10_000, 5.0) if quick else (100_000, 30.0)
    await warm(suite)
    async with acting(suite, "original") as user:
        parked = await user.until((await user.start("ask me whether to continue")).run_id, run_pb2.RUN_STATE_WAITING)
    before = await _sample(suite, seconds)
    connection = await asyncpg.connect(suite.database_url)
    try:
        await copy_conversation(connection, "original", parked.run_id, count=runs, stores=_STORES)
    finally:
        await connection.close()
    after = await _sample(suite, seconds)
    number = runs // 2
    async with acting(suite, copied_store(number, _STORES)) as user:
        copy = await user.until(copied_id(parked.run_id, number), run_pb2.RUN_STATE_WAITING)
        await user.answer(copy)
        await user.until(copy.run_id, run_pb2.RUN_STATE_COMPLETED)
    growth = after.agent_loop_mib - before.agent_loop_mib
    return Figure(
        code="P7",
        what=f"memory of agent-loop for {runs:,} parked runs, one of which then completes",
        value=growth,
        unit="MiB",
        target=f"no task, and at most {PARKED_MIB_MAX:.0f} MiB, the usual variation of an idle process",
        met=after.runs_held == 0 and growth <= PARKED_MIB_MAX,
        detail={"runs that the worker holds": after.runs_held}
        | {f"CPU of {name} before, ms a second": value for name, value in before.cpu.items()}
        | {f"CPU of {name}, ms a second": value for name, value in after.cpu.items()},
    )


async def measure(options: argparse.Namespace) -> list[Figure | NotMeasured]:
    with tempfile.TemporaryDirectory(prefix="pawl-bench-") as name:
        data = Path(name)
        data.chmod(0o755)
        async with roomy_suite(data / "suite") as suite:
            parked = await _parked_runs(suite, quick=options.quick)
            return [await _idle_sessions(suite, quick=options.quick), parked]


if __name__ == "__main__":
    uvloop.run(crowd(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
