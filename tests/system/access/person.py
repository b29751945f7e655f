"""Somebody who starts runs and watches them, with a credential that may be replaced at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from pawl.agent.v1 import agent_pb2
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.event.v1 import call_pb2, run_pb2
from pawl.notify.v1 import notify_pb2
from pawl.notify.v1.notify_pb2_grpc import NotifyServiceStub

T = TypeVar("T")
Metadata = Sequence[tuple[str, str]]


def bearer(credential: str) -> Metadata:
    return (("authorization", f"Bearer {credential}"),)


class Person:
    """A client that takes a new credential as soon as it is there: from then on no call of it may fail."""

    def __init__(self, credential: str, agent_loop: grpc.aio.Channel, notifier: grpc.aio.Channel) -> None:
        self.credential = credential
        self.begun = 0
        """Runs of `keep_running`, each begun after the one before has ended."""
        self.ended: list[run_pb2.Run] = []
        self.told: set[str] = set()
        """The runs of which a notification has come."""
        self._agent = AgentServiceStub(agent_loop)
        self._notify = NotifyServiceStub(notifier)

    async def keep_running(self, stop: asyncio.Event) -> None:
        """Play one run after the other to its end."""
        while not stop.is_set():
            self.begun += 1
            await self.play("what is 17 * 23?", "391")

    async def play(self, text: str, result: str) -> None:
        """Start a run and watch it to its end, by all of its events; its one call must have that in its result."""
        request = agent_pb2.StartRunRequest(text=text)
        run_id = (await self._calling(lambda shown: self._agent.StartRun(request, metadata=shown))).run.run_id
        seqs: list[int] = []

        async def watch(shown: Metadata) -> None:
            from_here = agent_pb2.WatchRunRequest(run_id=run_id, after_seq=len(seqs))
            async for answer in self._agent.WatchRun(from_here, metadata=shown):
                seqs.extend(event.seq for event in answer.events)

        await self._calling(watch)
        assert seqs == list(range(1, len(seqs) + 1))
        calls = agent_pb2.ListCallsRequest(run_id=run_id)
        (call,) = (await self._calling(lambda shown: self._agent.ListCalls(calls, metadata=shown))).calls
        assert call.state == call_pb2.CALL_STATE_SUCCEEDED, call
        assert result in call.result.content_json.decode()
        asked = agent_pb2.GetRunRequest(run_id=run_id)
        self.ended.append((await self._calling(lambda shown: self._agent.GetRun(asked, metadata=shown))).run)

    async def listen(self) -> None:
        """Hear of runs that have ended, for ever."""
        number = 0

        async def subscribe(shown: Metadata) -> None:
            nonlocal number
            request = notify_pb2.SubscribeRequest(after_number=number)
            async for answer in self._notify.Subscribe(request, metadata=shown):
                if answer.HasField("notification"):
                    assert answer.notification.number > number
                    number = answer.notification.number
                    self.told.add(answer.notification.run_id)
            raise AssertionError("notifications never end by themselves")

        await self._calling(subscribe)

    async def run_ids(self) -> list[str]:
        """Return all runs that there are."""
        found, token = list[str](), ""
        while True:
            request = agent_pb2.ListRunsRequest(page_size=200, page_token=token)
            page = await self._agent.ListRuns(request, metadata=bearer(self.credential))
            found += [run.run_id for run in page.runs]
            token = page.next_page_token
            if not token:
                return found

    async def _calling(self, call: Callable[[Metadata], Awaitable[T]]) -> T:
        """Make a call, and again if what it showed is refused and was replaced meanwhile; nothing else may fail."""
        while True:
            shown = self.credential
            try:
                return await call(bearer(shown))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED or shown == self.credential:
                    raise
