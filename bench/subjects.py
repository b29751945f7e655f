"""The subjects: Pawl and its alternatives. All of them do the same runs with the same model server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, Self

from bench import environments
from bench.database import connect
from bench.tools import EFFECTS_VARIABLE
from pawl.agent.v1 import agent_pb2
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.chassis.rpc.client import open_channel
from pawl.event.v1 import run_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.services import STAGES, ServiceSpec
from pawl.launcher.suite import Suite

PEERS: Final = Path(__file__).parent / "peers"
QUESTION: Final = "Look up three items, then tell me about them."
TRANSACTIONS: Final = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
JOBS_END: Final = "SELECT extract(epoch FROM max(end_time))::float8 FROM job_store.runs WHERE reports_to <> ''"
SYNCS: Final = "SELECT sum(fsyncs)::float8 FROM pg_stat_io WHERE object = 'wal'"
_READY_SECONDS: Final = 60.0
_DEADLINE_SECONDS: Final = 120.0


def start_request(tool: str) -> agent_pb2.StartRunRequest:
    """Return the request for a measured run. As with the peers, the model gets only one tool and calls it."""
    return agent_pb2.StartRunRequest(text=QUESTION, options=run_pb2.RunOptions(tool_names=[tool]))


START: Final = start_request("look_up")


_SPLIT: Final = {"agent-loop": {"PAWL_ROLE": "api"}, "agent-loop-1": {"PAWL_ROLE": "worker"}}


class Subject(Protocol):
    """A program that does runs. An async context manager."""

    name: str

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def run(self, count: int, at_once: int) -> list[float]:
        """Do `count` runs, `at_once` concurrently, and return their durations in seconds."""
        ...

    def processes(self) -> Mapping[str, int]:
        """Return the process ids of the measured processes by name."""
        ...


class Pawl:
    """The whole suite on this machine: services, PostgreSQL with fsync, and NATS. The client is in this process."""

    def __init__(
        self,
        data: Path,
        model_url: str,
        *,
        name: str = "Pawl",
        start: agent_pb2.StartRunRequest = START,
        replicas: Mapping[str, int] = MappingProxyType({}),
        environment: Mapping[str, str] = MappingProxyType({}),
        is_split: bool = False,
        stages: tuple[tuple[ServiceSpec, ...], ...] = STAGES,
    ) -> None:
        """With `is_split`, clients and runs have separate agent-loops."""
        self.name = name
        self._start = start
        self._is_split = is_split
        options = SuiteOptions(
            data=data,
            replicas={"agent-loop": 2, **replicas} if is_split else replicas,
            service_environment=_SPLIT if is_split else {},
            stages=stages,
            scripted_model=False,
            tool_environment=(EFFECTS_VARIABLE,),
            environment={
                "OPENAI_BASE_URL": model_url,
                "OPENAI_API_KEY": "none",
                "PAWL_MODEL": "canned",
                "PAWL_TOOLS": "bench.tools",
                "PAWL_LOG_LEVEL": "warning",
                # The same user starts all runs.
                "PAWL_ACTIVE_RUNS_PER_STORE": "1000",
                "PAWL_ACTIVE_RUNS_PER_USER": "1000",
                "PYTHONPATH": str(PEERS.parent.parent),
                **environment,
            },
        )
        self.suite = Suite(options)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.suite)
        await self._check_fsync()
        addresses = ",".join(self.suite.endpoints.addresses("agent-loop")[: 1 if self._is_split else None])
        self.channel = await self._stack.enter_async_context(
            open_channel(addresses, service_key=self.suite.local_key, deadline_seconds=_DEADLINE_SECONDS)
        )
        self.agents = AgentServiceStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self, count: int, at_once: int) -> list[float]:
        seconds: list[float] = []
        numbers = iter(range(count))

        async def work() -> None:
            for _ in numbers:
                began = time.monotonic()
                await self._one()
                seconds.append(time.monotonic() - began)

        await asyncio.gather(*(work() for _ in range(at_once)))
        return seconds

    def processes(self) -> Mapping[str, int]:
        names = ["postgres", "nats"] + [
            f"{service}/{replica}" if replica else service
            for service, replicas in self.suite.endpoints.services.items()
            for replica in range(len(replicas))
        ]
        found = {name: self.suite.pid(*_name_and_replica(name)) for name in names}
        return {name: pid for name, pid in found.items() if pid is not None}

    async def ask(self, query: str, *values: object) -> Any:
        """Return the first value of a database query."""
        async with connect(self.suite) as connection:
            return await connection.fetchval(query, *values)

    async def _check_fsync(self) -> None:
        for setting in ("fsync", "synchronous_commit"):
            if await self.ask(f"SHOW {setting}") != "on":
                raise RuntimeError(f"PostgreSQL runs without {setting}: the measured commits would not be durable")

    async def _one(self) -> None:
        run = (await self.agents.StartRun(self._start)).run
        text, state = "", run_pb2.RUN_STATE_UNSPECIFIED
        async for answer in self.agents.WatchRun(agent_pb2.WatchRunRequest(run_id=run.run_id)):
            for event in answer.events:
                if event.HasField("output_delta"):
                    text += event.output_delta.text
                elif event.HasField("run_changed"):
                    state = event.run_changed.run.state
        if state != run_pb2.RUN_STATE_COMPLETED or "the end" not in text:
            raise RuntimeError(f"{run.run_id} ended as {run_pb2.RunState.Name(state)} with {text!r}")


def _name_and_replica(name: str) -> tuple[str, int]:
    service, _, replica = name.partition("/")
    return service, int(replica or 0)


class Peer:
    """A program in bench/peers, in the environment of its folder. With `database`, it gets its own PostgreSQL."""

    def __init__(self, name: str, program: str, data: Path, model_url: str, *, database: bool = False) -> None:
        self.name = name
        self._program = PEERS / program
        self._data = data
        self._model_url = model_url
        suite = SuiteOptions(data=data / "database", scripted_model=False, stages=())
        self._database = Suite(suite) if database else None
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        environment = await environments.prepare(self._program.parent)
        arguments = [str(self._program), "--model", self._model_url, "--data", str(self._data)]
        self._data.mkdir(parents=True, exist_ok=True)
        if self._database is not None:
            await self._database.start()
            arguments += ["--database", self._database.database_url]
        self._process = await asyncio.create_subprocess_exec(
            str(environment.python),
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | environment.variables,
            limit=2**22,
        )
        async with asyncio.timeout(_READY_SECONDS):
            await self._line()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None and self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                async with asyncio.timeout(10):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
        if self._database is not None:
            await self._database.stop()

    async def run(self, count: int, at_once: int) -> list[float]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count} {at_once}\n".encode())
        seconds: list[float] = json.loads(await self._line())
        return seconds

    def processes(self) -> Mapping[str, int]:
        assert self._process is not None
        found = {"process": self._process.pid}
        postgres = self._database.pid("postgres") if self._database is not None else None
        return found if postgres is None else found | {"postgres": postgres}

    async def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            print(f"{self.name} ended; see its error above.", file=sys.stderr)
            raise RuntimeError(f"{self.name} ended")
        return line.decode()
