"""A real job-store process, and two replicas of the public side of agent-loop on it; the test is the worker."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import grpc
import pytest

from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.live import BusEvents
from pawl.agent_loop.loop.rules.options import RunDefaults
from pawl.agent_loop.wiring import ClientSide
from pawl.chassis.bus.connection import Bus
from pawl.chassis.ids import IdSource
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.process.metrics import Metrics
from pawl.chassis.rpc.client import open_channel
from pawl.chassis.rpc.server import RpcServer
from pawl.job.v1.ledger_pb2_grpc import LedgerServiceStub
from tests.fakes.agents import MemoryAgents
from tests.fakes.anybody import Anybody
from tests.fakes.checker import FakeChecker
from tests.keys import ENVIRONMENT, SERVICE_KEY
from tests.system.agent_loop.worker import Worker

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub


@pytest.fixture(scope="package")
def job_store(postgres_url: str, nats_url: str) -> Iterator[str]:
    """The address of a job store on a database of its own."""
    with tempfile.TemporaryDirectory(prefix="pawl-job-store-") as folder:
        address_file = Path(folder) / "address"
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "PAWL_DATABASE_URL": asyncio.run(_create_database(postgres_url)),
            "PAWL_DATABASE_UNSAFE": "true",
            "PAWL_NATS_URL": nats_url,
            "PAWL_LISTEN": "127.0.0.1:0",
            "PAWL_METRICS_LISTEN": "127.0.0.1:0",
            "PAWL_ADDRESS_FILE": str(address_file),
        }
        process = subprocess.Popen([sys.executable, "-m", "pawl.job_store"], env=environment)
        try:
            yield asyncio.run(_address(address_file, process))
        finally:
            process.terminate()
            process.wait(timeout=60)


async def _create_database(postgres_url: str) -> str:
    name = f"agent_loop_{os.urandom(6).hex()}"
    connection = await asyncpg.connect(postgres_url)
    try:
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE template0")
    finally:
        await connection.close()
    return postgres_url.replace("/postgres?", f"/{name}?", 1)


async def _address(file: Path, process: subprocess.Popen[bytes]) -> str:
    while not file.exists():
        assert process.poll() is None, "the job store does not start"
        await asyncio.sleep(0.02)
    return str(json.loads(file.read_text())["grpc"])


@pytest.fixture
async def ledger_channel(job_store: str) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(job_store, service_key=SERVICE_KEY) as channel:
        yield channel


@pytest.fixture
def store_id() -> str:
    """A store that only this test uses."""
    return f"store-{os.urandom(6).hex()}"


@pytest.fixture
def worker(ledger_channel: grpc.aio.Channel, store_id: str) -> Worker:
    return Worker(LedgerServiceStub(ledger_channel), store_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One replica: its API."""

    stub: AgentServiceAsyncStub


@pytest.fixture
async def replicas(ledger_channel: grpc.aio.Channel, nats_url: str, tmp_path: Path) -> AsyncIterator[list[Replica]]:
    async with AsyncExitStack() as stack:
        yield [await _replica(stack, number, ledger_channel, nats_url, tmp_path) for number in range(2)]


async def _replica(
    stack: AsyncExitStack, number: int, ledger_channel: grpc.aio.Channel, nats_url: str, folder: Path
) -> Replica:
    clock, metrics = SystemClock(), Metrics(f"replica_{number}")
    ids = IdSource(clock)
    bus = await stack.enter_async_context(Bus(nats_url, name=f"replica-{number}", metrics=metrics))
    await bus.wait_connected()
    clients = ClientSide(
        ledger=PublicLedger(ledger_channel),
        live=BusEvents(bus),
        agents=MemoryAgents(),
        registry=FakeChecker(),
        clock=clock,
        ids=ids,
        defaults=RunDefaults(model="the-model"),
    )
    await stack.enter_async_context(clients.watches)
    server = RpcServer(f"unix:{folder}/{number}", authenticator=Anybody(), ids=ids, metrics=metrics, drain_seconds=0.2)
    clients.add_to(server)
    await stack.enter_async_context(server)
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
    return Replica(stub=AgentServiceStub(channel))
