"""Watchers: they join a run at any seq and read it in parts through changing replicas, sometimes slowly, to its end."""

from __future__ import annotations

import asyncio
import contextlib
import random

import grpc

from pawl.agent.v1 import agent_pb2
from tests.chaos.caller import Caller
from tests.chaos.front_ends import seen
from tests.chaos.people import Person


class Watcher:
    def __init__(self, name: str, people: list[Person], draw: random.Random) -> None:
        self._name = name
        self._people = people
        self._draw = draw
        self._count = 0

    async def live(self) -> None:
        while True:
            person = self._draw.choice(self._people)
            if not person.open_runs:
                await asyncio.sleep(0.3)
                continue
            self._count += 1
            await self._watch(f"{self._name}-{self._count}", person.caller, self._draw.choice(list(person.open_runs)))

    async def _watch(self, watcher: str, caller: Caller, run_id: str) -> None:
        position = 0
        while True:
            pieces = self._draw.choice((1, 3, 20, 1000))
            stream = self._draw.choice(caller.stubs).WatchRun(
                agent_pb2.WatchRunRequest(run_id=run_id, after_seq=position), metadata=caller.metadata, timeout=20
            )
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for answer in stream:
                    for event in answer.events:
                        if event.seq != position + 1:
                            caller.history.complain(f"{watcher} got seq {event.seq} of {run_id} after {position}")
                        position = event.seq
                        caller.history.see(seen(watcher, event))
                    pieces -= 1
                    if pieces == 0:
                        break
                    if self._draw.random() < 0.01:
                        await asyncio.sleep(1.0)
                else:
                    return  # The server closed the stream: the run has ended.
            stream.cancel()
            await asyncio.sleep(0.05 + 0.3 * self._draw.random())
