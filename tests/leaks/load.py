"""Runs of all kinds, and streams of all kinds that are cancelled, by a client of the public API."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc

from pawl.agent.v1 import agent_pb2, session_pb2
from pawl.event.v1 import call_pb2
from pawl.notify.v1 import notify_pb2, notify_pb2_grpc
from tests.keys import keyed_channel
from tests.leaks.world import Services
from tests.system.suite.client import Agent

_SIDE_BY_SIDE: Final = 16


class Load:
    """One user at work. Everything it begins has ended when `work` returns."""

    def __init__(self, agent: Agent, inbox: notify_pb2_grpc.NotifyServiceAsyncStub, parked_run_id: str) -> None:
        self._agent = agent
        self._inbox = inbox
        self._parked_run_id = parked_run_id
        self._numbers = itertools.count()

    async def work(self, *, runs: int, streams: int) -> None:
        """Do so many of each, some side by side."""
        waiting: list[Callable[[], Awaitable[None]]] = [
            each
            for pair in itertools.zip_longest([self._run] * runs, [self._stream] * streams)
            for each in pair
            if each
        ]
        remaining = iter(waiting)

        async def work_off() -> None:
            for operation in remaining:
                await operation()

        async with asyncio.TaskGroup() as group:
            for _ in range(_SIDE_BY_SIDE):
                group.create_task(work_off())

    async def _run(self) -> None:
        match next(self._numbers) % 6:
            case 0:
                await self._cancel_while_the_model_streams()
            case 1:
                await self._cancel_while_it_waits()
            case 2:
                await self._call_the_front_end()
            case _:
                run = await self._agent.start("what is 17 * 23?")
                assert (await self._agent.events(run.run_id))[-1].type == "run.completed"

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

    async def _stream(self) -> None:
        match next(self._numbers) % 3:
            case 0:
                watch = agent_pb2.WatchRunRequest(run_id=self._parked_run_id)
                await _read_and_cancel(self._agent.stub.WatchRun(watch, metadata=self._agent.metadata))
            case 1:
                async with self._agent.session() as session:
                    await session.receipt(attach=session_pb2.Attach(run_id=self._parked_run_id))
                    await session.next("event")
            case _:
                subscribe = notify_pb2.SubscribeRequest()
                await _read_and_cancel(self._inbox.Subscribe(subscribe, metadata=self._agent.metadata))


@contextlib.asynccontextmanager
async def people(services: Services) -> AsyncIterator[Load]:
    """A user with a run that waits for an answer, and who was told so."""
    async with Agent(services.agent_loop) as agent, keyed_channel(services.notifier) as channel:
        inbox = notify_pb2_grpc.NotifyServiceStub(channel)
        run = await agent.start("book a table")
        await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
        await _read_and_cancel(inbox.Subscribe(notify_pb2.SubscribeRequest(), metadata=agent.metadata))
        yield Load(agent, inbox, run.run_id)
        await agent.stub.CancelRun(agent_pb2.CancelRunRequest(run_id=run.run_id), metadata=agent.metadata)
        await agent.until_ended(run.run_id)


async def _read_and_cancel(call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    await call.read()
    call.cancel()
