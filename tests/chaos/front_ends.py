"""Front ends: sessions that break and reconnect, run offered calls well or badly, and repeat unanswered frames."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2
from pawl.event.v1 import event_pb2
from tests.chaos.caller import Caller, Refused, settled, status_name
from tests.chaos.history import Kind, Operation, Outcome, Seen
from tests.chaos.prompts import PANEL

Stream: TypeAlias = "grpc.aio.StreamStreamCall[session_pb2.SessionRequest, session_pb2.SessionResponse]"

_HEARTBEAT_TICKS = 3
_BROKEN = (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    operation: Operation
    frame: session_pb2.SessionRequest
    receipt: asyncio.Future[types_pb2.Receipt]


class FrontEnd:
    """A client that can show panels.

    It reuses its id when it reconnects, and attaches to every open run of its user.
    """

    def __init__(self, caller: Caller, open_runs: Mapping[str, None]) -> None:
        self._caller = caller
        self._draw = caller.draw
        self._client_id = f"front-{caller.store_id}-{caller.user_id}"
        self._open_runs = open_runs
        self._unreceipted: dict[str, _Sent] = {}
        self._positions: dict[str, int] = {}
        self._outgoing: asyncio.Queue[session_pb2.SessionRequest] | None = None
        self._vanish = asyncio.Event()
        self._calm = False
        self._working: set[asyncio.Task[None]] = set()

    async def live(self) -> None:
        try:
            while True:
                await self._session()
                await asyncio.sleep(0.1 + self._draw.random())
        finally:
            for task in self._working:
                task.cancel()
            await asyncio.gather(*self._working, return_exceptions=True)

    def calm_down(self) -> None:
        """Disconnect once more, which releases accepted calls that are not done, and behave correctly from then on."""
        self._calm = True
        self._vanish.set()

    async def ask(self, operation: Operation, **frame: object) -> types_pb2.Receipt:
        """Send a frame again after each reconnect, until its receipt arrives.

        Raises:
            Refused: the receipt is an error.
        """
        request = session_pb2.SessionRequest(frame_id=operation.request_id, **frame)  # type: ignore[arg-type]
        sent = _Sent(operation=operation, frame=request, receipt=asyncio.get_running_loop().create_future())
        self._unreceipted[request.frame_id] = sent
        if self._outgoing is not None:
            self._outgoing.put_nowait(request)
        receipt = await sent.receipt
        if receipt.status == types_pb2.RECEIPT_STATUS_REFUSED:
            raise Refused(receipt.reason)
        return receipt

    async def submit(self, operation: Operation) -> None:
        result = types_pb2.ToolResult(call_id=operation.call_id, content_json=operation.content.encode())
        request = agent_pb2.SubmitToolResultsRequest(
            request_id=operation.request_id, run_id=operation.run_id, results=[result]
        )
        await self._caller.ask(operation, "SubmitToolResults", request)

    async def _session(self) -> None:
        stream = self._draw.choice(self._caller.stubs).Session(metadata=self._caller.metadata)
        hello = session_pb2.Hello(
            client_id=self._client_id, tools=[session_pb2.ClientTool(name=PANEL)], calls_max=self._draw.choice((1, 4))
        )
        outgoing = self._outgoing = asyncio.Queue()
        outgoing.put_nowait(session_pb2.SessionRequest(frame_id="hello", hello=hello))
        for sent in self._unreceipted.values():
            outgoing.put_nowait(sent.frame)
        self._vanish.clear()
        parts = [
            asyncio.create_task(part)
            for part in (self._write(stream, outgoing), self._read(stream), self._keep(outgoing), self._vanish.wait())
        ]
        try:
            session_seconds = self._draw.choice((3.0, 20.0, 60.0)) * self._draw.random()
            await asyncio.wait(parts, timeout=session_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._outgoing = None
            stream.cancel()
            for part in parts:
                part.cancel()
            ends = await asyncio.gather(*parts, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, _BROKEN):
                raise end

    async def _write(self, stream: Stream, outgoing: asyncio.Queue[session_pb2.SessionRequest]) -> None:
        while True:
            await stream.write(await outgoing.get())

    async def _keep(self, outgoing: asyncio.Queue[session_pb2.SessionRequest]) -> None:
        """Attach to new runs and send heartbeats."""
        attached: set[str] = set()
        ticks = 0
        while True:
            for run_id in [run_id for run_id in self._open_runs if run_id not in attached]:
                attached.add(run_id)
                attach = session_pb2.Attach(run_id=run_id, after_seq=self._positions.get(run_id, 0))
                outgoing.put_nowait(session_pb2.SessionRequest(frame_id=f"attach-{len(attached)}", attach=attach))
            ticks += 1
            if ticks % _HEARTBEAT_TICKS == 0:
                outgoing.put_nowait(session_pb2.SessionRequest(heartbeat=session_pb2.ClientHeartbeat()))
            await asyncio.sleep(0.7)

    async def _read(self, stream: Stream) -> None:
        while isinstance(frame := await stream.read(), session_pb2.SessionResponse):
            match frame.WhichOneof("frame"):
                case "event":
                    self._see(frame.event)
                case "receipt":
                    self._receipt(frame.receipt)
                case "offer":
                    task = asyncio.create_task(self._run(frame.offer))
                    self._working.add(task)
                    task.add_done_callback(self._working.discard)
                case _:
                    pass
            if self._draw.random() < 0.005:
                await asyncio.sleep(2.0)  # a client that reads slowly

    def _see(self, event: event_pb2.RunEvent) -> None:
        last = self._positions.get(event.run_id, 0)
        if event.seq > last + 1:
            # Fewer events are fine: a repeated frame attaches again, from the start.
            self._caller.history.complain(f"{self._client_id} got seq {event.seq} of {event.run_id} after {last}")
        self._positions[event.run_id] = max(last, event.seq)
        self._caller.history.see(seen(self._client_id, event))

    def _receipt(self, receipt: types_pb2.Receipt) -> None:
        sent = self._unreceipted.pop(receipt.frame_id, None)
        if sent is None:
            return
        refused = receipt.status == types_pb2.RECEIPT_STATUS_REFUSED
        self._caller.history.answer(
            sent.operation,
            Outcome.REFUSED if refused else Outcome.OK,
            receipt.reason if refused else status_name(receipt),
            run_id=receipt.run_id,
        )
        if not sent.receipt.done():
            sent.receipt.set_result(receipt)

    async def _run(self, offer: session_pb2.Offer) -> None:
        """Run a front-end tool immediately, slowly, twice, over a unary call, after a disconnect, or never."""
        draw = self._draw
        manners = ("well",) if self._calm else ("well", "slowly", "twice", "elsewhere", "vanishing", "not")
        manner = draw.choices(manners, (45, 15, 15, 10, 10, 5)[: len(manners)])[0]
        await asyncio.sleep(draw.random() * (4.0 if manner == "slowly" else 0.5))
        if manner == "not":
            return
        if manner == "vanishing":
            self._vanish.set()
            await asyncio.sleep(1.0 + 2.0 * draw.random())
        results = [self._result(offer) for _ in range(2 if manner == "twice" else 1)]
        with contextlib.suppress(Refused):
            if manner == "elsewhere":
                await self.submit(results[0])
            await settled(*(self._return(offer, result) for result in results))

    def _result(self, offer: session_pb2.Offer) -> Operation:
        return self._caller.invoke(
            Kind.RESULT,
            self._caller.next_id("result"),
            run_id=offer.call.run_id,
            call_id=offer.call.call_id,
            content=json.dumps(self._caller.next_id("shown")),
        )

    async def _return(self, offer: session_pb2.Offer, result: Operation) -> None:
        content = types_pb2.ToolResult(
            run_id=result.run_id,
            call_id=result.call_id,
            content_json=result.content.encode(),
            offer_epoch=offer.offer_epoch,
        )
        await self.ask(result, tool_result=content)


def seen(watcher: str, event: event_pb2.RunEvent) -> Seen:
    return Seen(watcher=watcher, run_id=event.run_id, seq=event.seq, digest=digest(event))


def digest(event: event_pb2.RunEvent) -> str:
    return hashlib.blake2b(event.SerializeToString(deterministic=True), digest_size=8).hexdigest()
