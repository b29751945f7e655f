"""A conversation with jobs, as its user sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pawl.client import AsyncClient
from pawl.event.v1 import call_pb2, message_pb2, run_pb2

PATIENCE_SECONDS = 240.0
COMPLETED = run_pb2.RUN_STATE_COMPLETED

T = TypeVar("T")


async def until(read: Callable[[], T], check: Callable[[T], bool]) -> T:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not check(found := read()):
            await asyncio.sleep(0.1)
    return found


class Talk:
    def __init__(self, pawl: AsyncClient) -> None:
        self._pawl = pawl
        self.conversation_id = ""

    async def say(self, text: str) -> run_pb2.Run:
        run = await self._pawl.start(text, conversation_id=self.conversation_id)
        self.conversation_id = run.conversation_id
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._pawl.result(run.run_id)

    async def jobs(self, run: run_pb2.Run) -> list[str]:
        return [call.child_run_id async for call in self._pawl.calls(run.run_id) if call.child_run_id]

    async def job(self, job_id: str, check: Callable[[run_pb2.Run], bool]) -> run_pb2.Run:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not check(job := await self._pawl.get(job_id)):
                await asyncio.sleep(0.1)
        return job

    async def ended(self, job_id: str) -> run_pb2.Run:
        return await self.job(job_id, lambda job: job.state >= COMPLETED)

    async def turns(self) -> list[list[dict[str, object]]]:
        """Return the job notices of each turn, in order, or `[]` if the model has not answered the last notice."""
        messages = [message async for message in self._pawl.messages(self.conversation_id)]
        if not messages or messages[-1].role != message_pb2.ROLE_ASSISTANT:
            return []
        return [json.loads(message.notices_json) for message in messages if message.notices_json]

    async def reported(self, count: int) -> list[dict[str, object]]:
        """Return the job notices in order, once there are at least `count` notices and the model has answered."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(found := [notice for turn in await self.turns() for notice in turn]) < count:
                await asyncio.sleep(0.1)
        return found

    async def end_reported(self, *jobs: str) -> list[dict[str, object]]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                found = await self.reported(1)
                if set(jobs) <= {notice["job_id"] for notice in found if is_end(notice)}:
                    return found
                await asyncio.sleep(0.2)


def is_end(notice: dict[str, object]) -> bool:
    """Return whether a notice reports the end of a job instead of an iteration."""
    return notice.keys().isdisjoint({"iteration", "report"})


def in_background(tool: str, **arguments: object) -> str:
    return f"call {tool} with {json.dumps({'_executeAsync': True} | arguments)}"


def count_of(effects: Path) -> int:
    return effects.read_text().count("done") if effects.exists() else 0


async def waiting(talk: Talk, job_id: str) -> call_pb2.Call:
    def awaits(job: run_pb2.Run) -> list[call_pb2.Call]:
        return [call for call in job.pending_calls if call.state == call_pb2.CALL_STATE_AWAITING_APPROVAL]

    (call,) = awaits(await talk.job(job_id, lambda job: bool(awaits(job))))
    return call
