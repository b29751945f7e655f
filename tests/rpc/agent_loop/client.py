"""A client of the Session stream that a test controls frame by frame."""

from __future__ import annotations

import itertools
from typing import Any

from pawl.agent.v1 import session_pb2, types_pb2
from tests.rpc.agent_loop.conftest import ME
from tests.rpc.stubs import AgentServiceAsyncStub

ACCEPTED = types_pb2.RECEIPT_STATUS_ACCEPTED
REFUSED = types_pb2.RECEIPT_STATUS_REFUSED


class Client:
    """One stream. Its frames get the ids f1, f2, and so on. Responses that arrive early are stored for later."""

    def __init__(self, stub: AgentServiceAsyncStub, *, metadata: Any = ME) -> None:
        self.stream: Any = stub.Session(metadata=metadata)
        self._numbers = itertools.count(1)
        self._kept: list[session_pb2.SessionResponse] = []

    async def hello(self, client_id: str = "cli_a", *tools: str, calls_max: int = 1, versions: Any = ()) -> str:
        hello = session_pb2.Hello(
            client_id=client_id,
            calls_max=calls_max,
            tools=[session_pb2.ClientTool(name=name, versions=versions) for name in tools],
        )
        frame_id = await self.send(hello=hello)
        welcome = (await self.next("welcome")).welcome
        assert (await self.receipt(frame_id)).status == ACCEPTED
        return str(welcome.client_id)

    async def send(self, frame_id: str = "", **frame: Any) -> str:
        frame_id = frame_id or f"f{next(self._numbers)}"
        await self.stream.write(session_pb2.SessionRequest(frame_id=frame_id, **frame))
        return frame_id

    async def ask(self, frame_id: str = "", **frame: Any) -> types_pb2.Receipt:
        return await self.receipt(await self.send(frame_id, **frame))

    async def attach(self, run_id: str = "run_1", after_seq: int = 0) -> types_pb2.Receipt:
        return await self.ask(attach=session_pb2.Attach(run_id=run_id, after_seq=after_seq))

    async def receipt(self, frame_id: str) -> types_pb2.Receipt:
        while True:
            response = await self.next("receipt")
            if response.receipt.frame_id == frame_id:
                return response.receipt

    async def next(self, *kinds: str) -> session_pb2.SessionResponse:
        for position, kept in enumerate(self._kept):
            if kept.WhichOneof("frame") in kinds:
                return self._kept.pop(position)
        while True:
            response = await self.stream.read()
            assert isinstance(response, session_pb2.SessionResponse), "the stream has ended"
            if response.WhichOneof("frame") in kinds:
                return response
            self._kept.append(response)

    async def events(self, count: int, run_id: str = "run_1") -> list[int]:
        seqs: list[int] = []
        while len(seqs) < count:
            event = (await self.next("event")).event
            if event.run_id == run_id:
                seqs.append(event.seq)
        return seqs

    async def offer(self) -> session_pb2.Offer:
        return (await self.next("offer")).offer

    async def heartbeat(self) -> None:
        await self.stream.write(session_pb2.SessionRequest(heartbeat=session_pb2.ClientHeartbeat()))

    async def answer(self, offer: session_pb2.Offer, content: bytes = b'"done"') -> types_pb2.Receipt:
        result = types_pb2.ToolResult(
            run_id=offer.call.run_id,
            call_id=offer.call.call_id,
            content_json=content,
            offer_epoch=offer.offer_epoch,
        )
        return await self.ask(tool_result=result)

    async def end(self) -> None:
        """Read to the end of the stream. Raise the error if it ended with one."""
        while isinstance(await self.stream.read(), session_pb2.SessionResponse):
            pass

    def leave(self) -> None:
        self.stream.cancel()
