"""The five services in this process, and a client that makes runs and cancelled streams of all kinds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, cast

import grpc
import httpx2
import msgspec

from pawl.agent.v1 import agent_pb2, session_pb2
from pawl.agent_loop.__main__ import main as agent_loop
from pawl.event.v1 import call_pb2
from pawl.gateway.__main__ import main as gateway
from pawl.job_store.__main__ import main as job_store
from pawl.launcher.suite import Suite
from pawl.notifier.__main__ import main as notifier
from pawl.notify.v1 import notify_pb2, notify_pb2_grpc
from pawl.tool_registry.__main__ import main as tool_registry
from tests.chaos.world import register_panel
from tests.keys import ENVIRONMENT, LOCAL_KEY, keyed_channel
from tests.system.suite.client import Agent

_SIDE_BY_SIDE: Final = 16
_SUM: Final = "what is 17 * 23?"
_START: Final = "/rpc/pawl.agent.v1.AgentService/StartRun"
_DATA: Final = "data: "
_PAUSE_SECONDS: Final = 0.1
# No connection is kept, so both ends close theirs.
_NONE_KEPT: Final = httpx2.Limits(max_keepalive_connections=0)


class Load:
    """One user at work. Everything it starts has ended when `work` returns."""

    def __init__(
        self,
        agent: Agent,
        inbox: notify_pb2_grpc.NotifyServiceAsyncStub,
        endpoint: httpx2.AsyncClient,
        parked_run_id: str,
    ) -> None:
        self._agent = agent
        self._inbox = inbox
        self._endpoint = endpoint
        self._parked_run_id = parked_run_id
        self._runs = itertools.cycle(
            (
                self._cancel_while_the_model_streams,
                self._complete,
                self._cancel_while_it_waits,
                self._complete_over_http,
                self._call_the_front_end,
                self._complete,
                self._complete_over_ag_ui,
            )
        )
        self._streams = itertools.cycle(
            (self._leave_a_run, self._leave_a_session, self._leave_the_inbox, self._leave_many, self._leave_events)
        )

    async def work(self, *, runs: int, streams: int) -> None:
        both = itertools.zip_longest(itertools.islice(self._runs, runs), itertools.islice(self._streams, streams))
        remaining = iter([each for pair in both for each in pair if each])

        async def work_off() -> None:
            for operation in remaining:
                await operation()

        async with asyncio.TaskGroup() as group:
            for _ in range(_SIDE_BY_SIDE):
                group.create_task(work_off())

    async def _complete(self) -> None:
        run = await self._agent.start(_SUM)
        assert (await self._agent.events(run.run_id))[-1].type == "run.completed"

    async def _complete_over_http(self) -> None:
        asked = {"requestId": str(uuid.uuid4()), "text": _SUM}
        while (answer := await self._endpoint.post(_START, json=asked)).status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            await asyncio.sleep(_PAUSE_SECONDS)
        assert answer.status_code == HTTPStatus.OK, answer.text
        assert await self._read("GET", f"/runs/{answer.json()['run']['runId']}/events") == {}

    async def _complete_over_ag_ui(self) -> None:
        """Disconnect from the run of a thread, then reconnect and read the rest."""
        asked = {"threadId": str(uuid.uuid4()), "runId": "1", "protocolVersion": "1.0"}
        message = {"id": "m1", "role": "user", "content": _SUM}
        began = await self._read("POST", "/agui", asked | {"messages": [message]}, events=1)
        assert began["type"] == "RUN_STARTED"
        ended = await self._read("POST", "/agui", asked | {"runId": "2", "messages": []})
        assert ended["type"] == "RUN_FINISHED"

    async def _cancel_while_the_model_streams(self) -> None:
        run = await self._agent.start("count to 200 slowly")
        async with contextlib.aclosing(self._agent.watch(run.run_id)) as events:
            async for event in events:
                if event.output_delta.text:
                    break
        await self._cancel(run.run_id)

    async def _cancel_while_it_waits(self) -> None:
        run = await self._agent.start("book a table")
        async with contextlib.aclosing(self._agent.watch(run.run_id)) as events:
            async for event in events:
                if event.call_changed.call.state == call_pb2.CALL_STATE_ASKED:
                    break
        await self._cancel(run.run_id)

    async def _cancel(self, run_id: str) -> None:
        await self._agent.stub.CancelRun(agent_pb2.CancelRunRequest(run_id=run_id), metadata=self._agent.metadata)
        assert (await self._agent.events(run_id))[-1].type == "run.cancelled"

    async def _call_the_front_end(self) -> None:
        async with self._agent.session("show_panel") as session:
            started = await session.receipt(start=session_pb2.Start(text="show me the plan"))
            offer = (await session.next("offer")).offer
            while offer.call.run_id != started.run_id:
                offer = (await session.next("offer")).offer
            await session.answer(offer, b'"shown"')
            await session.next("end")

    async def _leave_a_run(self) -> None:
        watch = agent_pb2.WatchRunRequest(run_id=self._parked_run_id)
        await _read_and_cancel(self._agent.stub.WatchRun(watch, metadata=self._agent.metadata))

    async def _leave_a_session(self) -> None:
        async with self._agent.session() as session:
            await session.receipt(attach=session_pb2.Attach(run_id=self._parked_run_id))
            await session.next("event")

    async def _leave_the_inbox(self) -> None:
        subscribe = notify_pb2.SubscribeRequest()
        await _read_and_cancel(self._inbox.Subscribe(subscribe, metadata=self._agent.metadata))

    async def _leave_many(self) -> None:
        run = {"method": "pawl.agent.v1.AgentService/WatchRun", "request": {"runId": self._parked_run_id}}
        pending = {"method": "pawl.agent.v1.AgentService/WatchPending"}
        subscribed = {"subscriptions": {"run": run, "pending": pending}}
        assert "message" in await self._read("POST", "/stream", subscribed, events=2)

    async def _leave_events(self) -> None:
        event = await self._read("GET", f"/runs/{self._parked_run_id}/events", events=1)
        assert event["runId"] == self._parked_run_id

    async def _read(self, method: str, path: str, asked: Any = None, *, events: int | None = None) -> Any:
        """Read some or all events of a gateway stream, and return the last one.

        Retries a stream that cannot be opened, as clients do.
        """
        found: list[Any] = []
        while not found:
            async with self._endpoint.stream(method, path, json=asked) as answer:
                if answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
                    await asyncio.sleep(_PAUSE_SECONDS)
                    continue
                assert answer.status_code == HTTPStatus.OK, await answer.aread()
                lines = cast("AsyncGenerator[str]", answer.aiter_lines())
                # A cancelled stream is closed here, not when it is garbage collected.
                async with contextlib.aclosing(lines):
                    async for line in lines:
                        if line.startswith(_DATA):
                            found.append(json.loads(line.removeprefix(_DATA)))
                        if len(found) == events:
                            break
        return found[-1]


@contextlib.asynccontextmanager
async def people(addresses: Mapping[str, str]) -> AsyncIterator[Load]:
    """Yield a user with a run that waits for an answer, and a notification about it."""
    user = {"authorization": f"Bearer {LOCAL_KEY}", "pawl-user": "me"}
    async with (
        Agent(addresses["agent_loop"]) as agent,
        keyed_channel(addresses["notifier"]) as channel,
        httpx2.AsyncClient(
            base_url=f"http://{addresses['gateway']}", headers=user, timeout=60.0, limits=_NONE_KEPT
        ) as endpoint,
    ):
        inbox = notify_pb2_grpc.NotifyServiceStub(channel)
        run = await agent.start("book a table")
        await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
        await _read_and_cancel(inbox.Subscribe(notify_pb2.SubscribeRequest(), metadata=agent.metadata))
        yield Load(agent, inbox, endpoint, run.run_id)
        await agent.stub.CancelRun(agent_pb2.CancelRunRequest(run_id=run.run_id), metadata=agent.metadata)
        await agent.until_ended(run.run_id)


async def _read_and_cancel(call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    await call.read()
    call.cancel()


_START_SECONDS_MAX: Final = 90.0
_SERVICES: Final[Mapping[str, Callable[[asyncio.Event], Awaitable[None]]]] = {
    "job_store": job_store,
    "tool_registry": tool_registry,
    "notifier": notifier,
    "agent_loop": agent_loop,
    "gateway": gateway,
}


@contextlib.asynccontextmanager
async def running(suite: Suite, folder: Path) -> AsyncIterator[Mapping[str, str]]:
    addresses: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name, main in _SERVICES.items():
            addresses[name] = await stack.enter_async_context(
                _one(name, main, _environment(suite, name, addresses), folder)
            )
        await register_panel(addresses["tool_registry"], "local")
        yield addresses


@contextlib.asynccontextmanager
async def _one(
    name: str, main: Callable[[asyncio.Event], Awaitable[None]], environment: Mapping[str, str], folder: Path
) -> AsyncIterator[str]:
    address_file = folder / f"{name}.addresses"
    address_file.unlink(missing_ok=True)
    for variable in [variable for variable in os.environ if variable.startswith(("PAWL_", "OPENAI_"))]:
        del os.environ[variable]
    os.environ.update(environment, PAWL_ADDRESS_FILE=str(address_file))
    stop = asyncio.Event()
    task = asyncio.ensure_future(main(stop))
    try:
        async with asyncio.timeout(_START_SECONDS_MAX):
            while not address_file.exists():
                if task.done():
                    await task
                await asyncio.sleep(0.01)
        listens = msgspec.json.decode(address_file.read_bytes(), type=dict[str, str])
        yield listens.get("grpc") or listens["http"]
    finally:
        stop.set()
        await task


def _environment(suite: Suite, name: str, addresses: Mapping[str, str]) -> dict[str, str]:
    return {
        **ENVIRONMENT,
        "PAWL_LISTEN": "127.0.0.1:0",
        "PAWL_METRICS_LISTEN": "127.0.0.1:0",
        "PAWL_LOG_LEVEL": "warning",
        "PAWL_DATABASE_URL": suite.database_url,
        "PAWL_NATS_URL": suite.nats_url(name),
        "PAWL_JOB_STORE_ADDRESS": addresses.get("job_store", ""),
        "PAWL_TOOL_REGISTRY_ADDRESS": addresses.get("tool_registry", ""),
        "PAWL_NOTIFIER_ADDRESS": addresses.get("notifier", ""),
        "PAWL_AGENT_LOOP_ADDRESS": addresses.get("agent_loop", ""),
        "PAWL_GATEWAY_SEAL_KEY": "seal-key-of-the-leak-tests-0123456789",
        "PAWL_ACTIVE_RUNS_PER_USER": "1000",
        "PAWL_ACTIVE_RUNS_PER_STORE": "1000",
        "OPENAI_BASE_URL": suite.endpoints.model_base_url or "",
        "OPENAI_API_KEY": "none",
        "PAWL_MODEL": "pawl-scripted",
    }
