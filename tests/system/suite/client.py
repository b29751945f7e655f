"""A client of the public API that uses only generated stubs, and helpers that act on a suite."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from pawl.agent.v1 import agent_pb2, agent_pb2_grpc, session_pb2, types_pb2
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.identity.v1 import key_pb2
from pawl.identity.v1.key_pb2_grpc import KeyServiceStub
from pawl.launcher.suite import Suite
from tests.keys import keyed_channel

PATIENCE_SECONDS = 240.0
ENDED = frozenset(
    {
        run_pb2.RUN_STATE_COMPLETED,
        run_pb2.RUN_STATE_FAILED,
        run_pb2.RUN_STATE_CANCELLED,
        run_pb2.RUN_STATE_EXPIRED,
    }
)
ENDINGS = frozenset({"run.completed", "run.failed", "run.cancelled", "run.expired"})


def addresses(suite: Suite, service: str = "agent-loop") -> list[str]:
    return [replica.grpc for replica in suite.endpoints.services[service]]


async def kill(suite: Suite, *services: str) -> None:
    """Kill all replicas of these services and wait until they are ready again."""
    replicas = [(service, number) for service in services for number in range(len(suite.endpoints.services[service]))]
    for replica in replicas:
        suite.kill(*replica)
    for replica in replicas:
        await suite.wait_ready(*replica)


async def key_for(suite: Suite, user_id: str, *roles: str, store: str = "local") -> str:
    """Return the secret of a new key, created with the local key."""
    key = key_pb2.Key(name=user_id, store_id=store, user_id=user_id, roles=roles)
    async with keyed_channel(addresses(suite, "job-store")[0]) as channel:
        request = key_pb2.CreateKeyRequest(key=key)
        return (await KeyServiceStub(channel).CreateKey(request, metadata=(("pawl-store", store),))).secret


def mails_sent(suite: Suite) -> set[str]:
    return {str(path) for path in (suite.folder.path / "outbox").glob("**/*.eml")}


class Agent:
    def __init__(self, address: str, *, user: str = "me", store: str = "local", key: str = "") -> None:
        """With a key, `store` is ignored, and `user` is empty or the user for whom a delegate acts."""
        self.channel = keyed_channel(address)
        self.stub = agent_pb2_grpc.AgentServiceStub(self.channel)
        named = {"pawl-user": user, "pawl-store": "" if key else store, "authorization": key and f"Bearer {key}"}
        self.metadata = tuple((name, value) for name, value in named.items() if value)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.channel.close()

    async def start(
        self,
        text: str,
        *,
        request_id: str = "",
        conversation_id: str = "",
        options: run_pb2.RunOptions | None = None,
        parts: Sequence[message_pb2.Part] = (),
    ) -> run_pb2.Run:
        request = agent_pb2.StartRunRequest(
            request_id=request_id, conversation_id=conversation_id, text=text, options=options, parts=parts
        )
        return (await self.stub.StartRun(request, metadata=self.metadata)).run

    async def get(self, run_id: str) -> run_pb2.Run:
        return (await self.stub.GetRun(agent_pb2.GetRunRequest(run_id=run_id), metadata=self.metadata)).run

    async def until(self, run_id: str, wanted: Callable[[run_pb2.Run], bool]) -> run_pb2.Run:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    run = await self.get(run_id)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                else:
                    if wanted(run):
                        return run
                    assert run.state not in ENDED, f"the run ended: {run}"
                await asyncio.sleep(0.05)

    async def until_ended(self, run_id: str) -> run_pb2.Run:
        return await self.until(run_id, lambda run: run.state in ENDED)

    async def whole_log(self, run_id: str) -> list[event_pb2.RunEvent]:
        """Wait for the end of a run and return its log, without gaps and with one end (EVT-1, EVT-4)."""
        await self.until_ended(run_id)
        events = await self.events(run_id)
        assert [event.seq for event in events] == list(range(1, len(events) + 1)), "the log has a gap"
        assert [event.type for event in events if event.type in ENDINGS] == [events[-1].type], "a run ends once"
        return events

    async def until_pending(self, run_id: str, state: call_pb2.CallState.ValueType) -> call_pb2.Call:
        run = await self.until(run_id, lambda run: any(call.state == state for call in run.pending_calls))
        return next(call for call in run.pending_calls if call.state == state)

    async def events(self, run_id: str, *, after_seq: int = 0) -> list[event_pb2.RunEvent]:
        return [event async for event in self.watch(run_id, after_seq=after_seq)]

    async def watch(self, run_id: str, *, after_seq: int = 0) -> AsyncGenerator[event_pb2.RunEvent, None]:
        request = agent_pb2.WatchRunRequest(run_id=run_id, after_seq=after_seq)
        call = self.stub.WatchRun(request, metadata=self.metadata)
        try:
            async for answer in call:
                for event in answer.events:
                    yield event
        finally:
            # Closing this generator cancels the stream; gRPC itself would wait for further reads.
            call.cancel()

    async def calls(self, run_id: str) -> list[call_pb2.Call]:
        request = agent_pb2.ListCallsRequest(run_id=run_id, page_size=200)
        return list((await self.stub.ListCalls(request, metadata=self.metadata)).calls)

    async def decide(
        self, call: call_pb2.Call, kind: call_pb2.DecisionKind.ValueType, *, request_id: str = "", **fields: str | bytes
    ) -> agent_pb2.DecideResponse:
        decision = types_pb2.CallDecision(
            call_id=call.call_id,
            kind=kind,
            digest=call.approval.digest,
            **fields,  # type: ignore[arg-type]  # the fields of a decision
        )
        request = agent_pb2.DecideRequest(request_id=request_id, run_id=call.run_id, decision=decision)
        return await self.stub.Decide(request, metadata=self.metadata)

    async def cancel(self, run_id: str) -> run_pb2.Run:
        await self.stub.CancelRun(agent_pb2.CancelRunRequest(run_id=run_id), metadata=self.metadata)
        return await self.until_ended(run_id)

    @asynccontextmanager
    async def session(self, *tools: str) -> AsyncIterator[Session]:
        stream = self.stub.Session(metadata=self.metadata)
        session = Session(stream)
        try:
            tools_of_client = [session_pb2.ClientTool(name=name) for name in tools]
            await session.send(hello=session_pb2.Hello(tools=tools_of_client, calls_max=4))
            await session.next("welcome")
            yield session
        finally:
            stream.cancel()


class Session:
    def __init__(
        self, stream: grpc.aio.StreamStreamCall[session_pb2.SessionRequest, session_pb2.SessionResponse]
    ) -> None:
        self._stream = stream
        self._numbers = itertools.count(1)

    async def send(self, **frame: object) -> str:
        frame_id = f"frame-{next(self._numbers)}"
        await self._stream.write(session_pb2.SessionRequest(frame_id=frame_id, **frame))  # type: ignore[arg-type]
        return frame_id

    async def next(self, kind: str) -> session_pb2.SessionResponse:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                frame = await self._stream.read()
                assert isinstance(frame, session_pb2.SessionResponse), "the server closed the stream"
                if frame.WhichOneof("frame") == kind:
                    return frame

    async def receipt(self, **frame: object) -> types_pb2.Receipt:
        frame_id = await self.send(**frame)
        while True:
            receipt = (await self.next("receipt")).receipt
            if receipt.frame_id == frame_id:
                return receipt

    async def answer(self, offer: session_pb2.Offer, content_json: bytes) -> types_pb2.Receipt:
        return await self.receipt(
            tool_result=types_pb2.ToolResult(
                run_id=offer.call.run_id,
                call_id=offer.call.call_id,
                content_json=content_json,
                offer_epoch=offer.offer_epoch,
            )
        )


@dataclass(frozen=True)
class Refusal:
    code: grpc.StatusCode
    reason: str = ""


TAKEN = Refusal(grpc.StatusCode.OK)


async def outcome(call: Awaitable[object]) -> Refusal:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        refused = error
    else:
        return TAKEN
    info = error_details_pb2.ErrorInfo()
    for key, value in refused.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                detail.Unpack(info)
    assert info.domain in {"pawl", ""}
    assert "Traceback" not in (refused.details() or "")
    return Refusal(refused.code(), info.reason)
