"""The waits of the runs below a watched one: of runs that do its calls, and of calls of theirs."""

from __future__ import annotations

import asyncio
from typing import Final

import grpc

from pawl.agent.v1 import agent_pb2
from pawl.cli.target import Target
from pawl.cli.transcript import Transcript, decides, hint
from pawl.event.v1 import run_pb2

_POLL_SECONDS: Final = 1.0


class Below:
    """Shows, while a run waits for others, what they wait for, each call once. Its tasks end with `close`."""

    def __init__(self, target: Target, transcript: Transcript, run_id: str) -> None:
        self._target = target
        self._transcript = transcript
        self._run_id = run_id
        self._shown: set[tuple[str, int]] = set()
        self._task: asyncio.Task[None] | None = None

    async def note(self, run: run_pb2.Run) -> None:
        """Take note of the state of the run."""
        waits = run.state == run_pb2.RUN_STATE_WAITING and run_pb2.WAIT_KIND_AGENT in run.waits
        if not waits:
            await self.close()
        elif self._task is None:
            self._task = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Look no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _look(self) -> None:
        while True:
            request = agent_pb2.GetRunRequest(run_id=self._run_id)
            try:
                run = (await self._target.agents.GetRun(request)).run
            except grpc.aio.AioRpcError:
                run = run_pb2.Run()  # Whoever watches says so, or it passes.
            for call in run.pending_calls:
                key = (call.call_id, call.state)
                if call.run_id != self._run_id and key not in self._shown:
                    self._shown.add(key)
                    self._transcript.pending(call)
                    self._transcript.command(hint(call, decides=decides(run)))
            await asyncio.sleep(_POLL_SECONDS)
