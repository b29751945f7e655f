from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from pawl.agent.v1 import agent_pb2
from pawl.chassis.ids import IdSource
from pawl.chassis.process.clock import SystemClock
from pawl.client import AsyncClient, Client, NoAnswer
from pawl.errors import (
    RunNotFound,
)
from pawl.launcher.ports import free_port
from tests.fakes.session_agent import FakeLive
from tests.rpc.agent_loop.conftest import client_side, new_server
from tests.rpc.agent_loop.ledger import PlayedLedger

KEY = "key-of-me-0123456789"


class Endpoint:
    """An agent-loop that can stop and restart at one address."""

    def __init__(self, ledger: PlayedLedger, live: FakeLive, ids: IdSource) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._ledger, self._live, self._ids = ledger, live, ids

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        clock: Any = SystemClock()  # The inbox is polled repeatedly
        clients = client_side(self._ledger, self._live, clock, self._ids)
        async with clients.watches, new_server(clients, self.address, self._ids):
            yield

    def client(self, key: str = KEY, **options: Any) -> AsyncClient:
        return AsyncClient(self.address, api_key=key, environment={}, **options)


@pytest.fixture
def endpoint(ledger: PlayedLedger, live: FakeLive, ids: IdSource) -> Endpoint:
    return Endpoint(ledger, live, ids)


async def test_request_with_a_lost_response_takes_effect_once(endpoint: Endpoint, ledger: PlayedLedger) -> None:
    """I2: the client retries with the same request id."""
    async with endpoint.open(), endpoint.client() as pawl:
        method, lost = pawl.agents.StartRun, 0

        async def lossy(request: agent_pb2.StartRunRequest) -> agent_pb2.StartRunResponse:
            nonlocal lost
            response: agent_pb2.StartRunResponse = await method(request)
            if lost < 3:
                lost += 1
                raise NoAnswer
            return response

        started = await pawl.once(lossy, agent_pb2.StartRunRequest(text="hello"))
    assert lost == 3
    assert list(ledger.runs) == [started.run.run_id]


async def test_a_run_continues_the_trace_of_its_caller(endpoint: Endpoint) -> None:
    """Repeated requests need not be in the same trace."""
    first, second = SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(1)), SpanContext(3, 4, is_remote=True)
    async with endpoint.open(), endpoint.client() as pawl:
        runs = []
        for context in (first, second):
            with use_span(NonRecordingSpan(context)):
                request = agent_pb2.StartRunRequest(request_id="r", text="hello")
                runs.append((await pawl.agents.StartRun(request)).run)
        garbage = (("traceparent", "garbage"),)
        other = (await pawl.agents.StartRun(agent_pb2.StartRunRequest(text="hello"), metadata=garbage)).run
    expected = f"00-{1:032x}-{2:016x}-01"
    assert {(run.run_id, run.traceparent, run.trace) for run in runs} == {(runs[0].run_id, expected, expected)}
    assert (other.traceparent, other.trace) == ("", "")


# The synchronous client.


async def test_synchronous_client_behaves_like_the_async_one(endpoint: Endpoint, ledger: PlayedLedger) -> None:
    await ledger.add_run()
    await ledger.append(count=3, text="ab")
    await ledger.finish()

    def program() -> tuple[str, int, list[str]]:
        with Client(endpoint.address, api_key=KEY, environment={}) as pawl:
            text = "".join(pawl.text("run_1"))
            events = sum(1 for _ in pawl.watch("run_1"))
            with pytest.raises(RunNotFound):
                pawl.get("run_2")
            with pytest.raises(RunNotFound):
                next(pawl.watch("run_2"))
            pawl.start("hello", request_id="r1")
            pawl.start("hello", request_id="r1")
            return text, events, [run.run_id for run in pawl.runs()]

    async with endpoint.open():
        text, events, runs = await asyncio.to_thread(program)
    assert (text, events) == ("ababab", 5)
    assert sorted(runs) == sorted(ledger.runs)
    assert len(runs) == 2


async def test_a_closed_client_raises_and_leaves_no_thread(endpoint: Endpoint) -> None:
    pawl = Client(endpoint.address, api_key=KEY, environment={})
    assert "pawl-client" in [thread.name for thread in threading.enumerate()]
    await asyncio.to_thread(pawl.close)
    pawl.close()
    assert "pawl-client" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="the client is closed"):
        pawl.get("run_1")


async def test_followed_conversation_survives_a_restart_of_the_server(endpoint: Endpoint, ledger: PlayedLedger) -> None:
    """ASYNC-5: each message and event is yielded once, also those added while no server was running."""
    await ledger.add_run("run_1")
    seen: list[int] = []
    async with endpoint.client() as pawl, aclosing(pawl.follow("conv_1")) as following:
        for count in (1, 3):
            async with endpoint.open(), asyncio.timeout(60):
                while len(seen) < count:
                    seen += [event.seq for event in (await anext(following)).events]
            await ledger.append(count=2)
    assert seen == [1, 2, 3]
