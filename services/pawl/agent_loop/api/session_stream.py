"""One client stream, from its hello frame to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from pawl.agent.v1 import session_pb2 as pb
from pawl.agent.v1.session_pb2 import SessionRequest, SessionResponse
from pawl.agent.v1.types_pb2 import Receipt, ToolResult
from pawl.agent_loop.api import replies, session_frames
from pawl.agent_loop.api.inbox import REFUSALS, Inbox, derived_id
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.messages import Messages, SessionTools, definitions
from pawl.agent_loop.api.offers import Offers
from pawl.agent_loop.api.replies import ACCEPTED, Reply
from pawl.agent_loop.api.values import ClientSession
from pawl.agent_loop.api.watch import Watches
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RequestId, RunId
from pawl.chassis.process.clock import Clock
from pawl.chassis.process.tasks import within
from pawl.errors import (
    Cancelled,
    DeadlineExceeded,
    HelloRequired,
    InvalidField,
    Overloaded,
    PawlError,
    SlowConsumer,
)
from pawl.event.v1.event_pb2 import RunEvent
from pawl.event.v1.gap_pb2 import Gap
from pawl.event.v1.run_pb2 import Run
from pawl.values import ENDED, RESTING

ATTACHMENTS_MAX: Final = 64

_FRAME_ID_CHARACTERS_MAX: Final = 64
_OUTGOING_FRAMES_MAX: Final = 64
_OUTGOING_BYTES_MAX: Final = 1024 * 1024
_RELEASE_SECONDS: Final = 0.4

Send = Callable[[SessionResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTimes:
    offer_lease_seconds: float = 30.0
    heartbeat_seconds: float = 15.0
    silence_max_seconds: float = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Dependencies that all of a replica's streams share."""

    ledger: PublicLedger
    watches: Watches
    messages: Messages
    inbox: Inbox
    clock: Clock
    times: SessionTimes


class Outgoing(asyncio.Queue[SessionResponse]):
    """Frames waiting for the client, limited in number and in the total size of their events.

    An event can be up to 1 MiB.
    """

    _events_bytes = 0

    def full(self) -> bool:
        return super().full() or self._events_bytes >= _OUTGOING_BYTES_MAX

    def _put(self, item: SessionResponse) -> None:
        super()._put(item)
        self._events_bytes += _size_bytes(item)

    def _get(self) -> SessionResponse:
        item = super()._get()
        self._events_bytes -= _size_bytes(item)
        return item


class Stream:
    def __init__(self, parts: Parts, caller: Principal, client: ClientSession, hello: pb.Hello, send: Send) -> None:
        self._parts = parts
        self._caller = caller
        self._client_id = client.client_id
        self._send = send
        self._outgoing = Outgoing(_OUTGOING_FRAMES_MAX)
        self._sent_seqs: dict[str, int] = {}
        self._attachments: dict[str, asyncio.Task[None]] = {}
        # Runs that ended or were parked, as sent to the client after its last frame.
        self._unconfirmed: set[str] = set()
        self._tasks = asyncio.TaskGroup()
        self._heard_at = 0.0
        self._busy = False
        self._tools = SessionTools(client_id=client.client_id, definitions=definitions(hello.front_end_tools))
        self.superseded = asyncio.Event()
        self._offers = Offers(
            ledger=parts.ledger,
            clock=parts.clock,
            caller=caller,
            client=client,
            tools=hello.tools,
            calls_max=hello.calls_max or 1,
            lease_seconds=parts.times.offer_lease_seconds,
            show=self._outgoing.put,
            replaced=self.superseded.set,
        )

    async def serve(self, hello_frame_id: str, incoming: AsyncIterator[SessionRequest]) -> None:
        times = self._parts.times
        welcome = pb.Welcome(
            client_id=self._client_id,
            offer_lease_seconds=times.offer_lease_seconds,
            silence_max_seconds=times.silence_max_seconds,
        )
        self._heard_at = asyncio.get_running_loop().time()
        async with self._tasks:
            background = [
                self._tasks.create_task(self._write(), name="session.write"),
                self._tasks.create_task(self._offers.run(), name="session.offers"),
                self._tasks.create_task(self._watch_over(), name="session.watch_over"),
            ]
            await self._outgoing.put(SessionResponse(welcome=welcome))
            await self._answer(replies.receipt(ACCEPTED, frame_id=hello_frame_id))
            async for frame in incoming:
                self._heard_at, self._busy = asyncio.get_running_loop().time(), True
                await self._handle(frame)
                self._busy = False
            while self._attachments:
                await asyncio.wait(self._attachments.values())
            await self._outgoing.join()
            for task in background:
                task.cancel()

    async def give_back(self) -> None:
        """Release the client's leases. Leases that are not released within a short timeout expire."""
        await within(_RELEASE_SECONDS, self._offers.release_all())

    async def _write(self) -> None:
        heartbeat_seconds = self._parts.times.heartbeat_seconds
        while True:
            frame = await within(heartbeat_seconds, self._outgoing.get())
            if frame is None:
                await self._send(SessionResponse(heartbeat=pb.ServerHeartbeat()))
                continue
            await self._send(frame)
            if frame.HasField("event"):
                event = frame.event
                self._sent_seqs[event.run_id] = event.seq
                if event.run_changed.run.state in RESTING:
                    self._unconfirmed.add(event.run_id)
            elif frame.HasField("gap"):
                self._sent_seqs[frame.gap.run_id] = frame.gap.to_seq
            self._outgoing.task_done()

    async def _watch_over(self) -> None:
        """End the stream if the client is silent for too long or has opened another stream."""
        loop = asyncio.get_running_loop()
        silence_max_seconds = self._parts.times.silence_max_seconds
        while True:
            silent_seconds = 0.0 if self._busy else loop.time() - self._heard_at
            if silent_seconds >= silence_max_seconds:
                raise DeadlineExceeded(f"no frame arrived for {silence_max_seconds:g} s")
            if not await within(silence_max_seconds - silent_seconds, self.superseded.wait()):
                continue
            # Send the outstanding receipts first.
            await within(_RELEASE_SECONDS, self._outgoing.join())
            raise Cancelled("the client opened another stream: use a different client_id for each program")

    async def _handle(self, frame: SessionRequest) -> None:
        """Handle the frame. Every frame except a heartbeat gets one receipt.

        Raises:
            PawlError: No receipt is possible. The stream ends, and the client can send the frame again.
        """
        while self._unconfirmed:  # A new frame proves that the client received those events.
            self._parts.watches.confirm(self._caller, RunId(self._unconfirmed.pop()))
        if frame.HasField("heartbeat"):
            await self._offers.renew()
            return
        try:
            session_frames.check(frame)
        except REFUSALS as error:
            await self._answer(replies.receipt(replies.refusal(error), frame_id=_frame_id(frame)))
            return
        if frame.HasField("hello"):
            raise HelloRequired
        try:
            receipt = await self._receipt(frame)
        except REFUSALS as error:
            receipt = _receipt(frame, replies.refusal(error))
        if receipt is not None:
            await self._answer(receipt)

    async def _answer(self, receipt: Receipt) -> None:
        await self._outgoing.put(SessionResponse(receipt=receipt))

    async def _receipt(self, frame: SessionRequest) -> Receipt | None:
        """Execute the frame. Return its receipt, or None if the receipt was already sent."""
        request_id = derived_id(self._client_id, frame.frame_id)
        caller, inbox, messages = self._caller, self._parts.inbox, self._parts.messages
        match frame.WhichOneof("frame"):
            case "start":
                run = await messages.start(caller, request_id, frame.start, self._tools)
                await self._attach(frame, RunId(run.run_id), 0)
                return None
            case "attach":
                await self._attach(frame, RunId(frame.attach.run_id), frame.attach.after_seq)
                return None
            case "detach":
                await self._detach(frame.detach.run_id, release=True)
                return _receipt(frame, ACCEPTED)
            case "tool_result":
                return _receipt(frame, await self._submit(request_id, frame.tool_result))
            case "tool_progress":
                progress = frame.tool_progress
                client = self._offers.session_of(progress.call_id)
                reply = await inbox.report_progress(caller, request_id, progress, client)
                await self._offers.renew()
                return _receipt(frame, reply)
            case "decision":
                return _receipt(frame, await inbox.decide(caller, request_id, frame.decision))
            case "cancel":
                cancel = frame.cancel
                return _receipt(frame, await inbox.cancel(caller, request_id, RunId(cancel.run_id), cancel.reason))
            case "message":
                sent = await messages.send(caller, request_id, frame.message)
                return _receipt(frame, ACCEPTED, run_id=sent.run.run_id)
            case _:
                raise HelloRequired

    async def _submit(self, request_id: RequestId, result: ToolResult) -> Reply:
        if result.offer_epoch == 0:
            raise InvalidField("offer_epoch must match the offer's epoch", field="tool_result.offer_epoch")
        self._offers.submitting(result.call_id)
        outcome: int | None = None
        try:
            client = self._offers.session_of(result.call_id)
            reply = await self._parts.inbox.submit_result(self._caller, request_id, result, client)
            outcome = reply.outcome
        finally:
            self._offers.submitted(result.call_id, result.offer_epoch, outcome)
        return reply

    async def _attach(self, frame: SessionRequest, run_id: RunId, after_seq: int) -> None:
        """Attach to a run, or attach again from another position. The receipt is sent before the first event."""
        await self._detach(run_id, release=False)
        if len(self._attachments) >= ATTACHMENTS_MAX:
            raise Overloaded(f"a session can attach to at most {ATTACHMENTS_MAX} runs: open another session")
        attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = self._tasks.create_task(
            self._stream(frame, run_id, after_seq, attached), name=f"session.attachment {run_id}"
        )
        self._attachments[run_id] = task
        await attached

    async def _detach(self, run_id: str, *, release: bool) -> None:
        task = self._attachments.pop(run_id, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        if release:
            await self._offers.leave(run_id, release=True)

    async def _stream(
        self, frame: SessionRequest, run_id: RunId, after_seq: int, attached: asyncio.Future[None]
    ) -> None:
        self._sent_seqs[run_id] = after_seq
        try:
            async with self._parts.watches.open(self._caller, run_id, after_seq) as watcher:
                run = await self._parts.ledger.get_run(self._caller, run_id)
                self._offers.adopt(run)
                await self._answer(_receipt(frame, ACCEPTED, run_id=run_id))
                if not attached.done():  # The future is already done if the stream is ending.
                    attached.set_result(None)
                async with aclosing(watcher.events()) as events:
                    await self._show(run, after_seq, events)
        except SlowConsumer as error:
            raise SlowConsumer(
                error.message, run_id=run_id, resume_after_seq=self._sent_seqs.get(run_id, after_seq)
            ) from None
        except PawlError as error:
            if attached.done():
                raise
            attached.set_exception(error)
        finally:
            if not attached.done():
                attached.cancel()
        if self._attachments.get(run_id) is asyncio.current_task():
            del self._attachments[run_id]
            await self._offers.leave(run_id, release=False)

    async def _show(self, run: Run, after_seq: int, events: AsyncIterator[RunEvent | Gap]) -> None:
        last_seq, state = after_seq, run.state
        async for event in events:
            if isinstance(event, Gap):
                await self._outgoing.put(SessionResponse(gap=event))
                last_seq = event.to_seq
                continue
            await self._outgoing.put(SessionResponse(event=event))
            last_seq, state = event.seq, event.run_changed.run.state or state
            if event.HasField("call_changed") and event.seq > run.last_seq:
                self._offers.see(event.call_changed.call)
        ended = state if state in ENDED else run.state
        await self._outgoing.put(SessionResponse(end=pb.End(run_id=run.run_id, last_seq=last_seq, state=ended)))


def _size_bytes(frame: SessionResponse) -> int:
    return frame.ByteSize() if frame.HasField("event") else 0


def _receipt(frame: SessionRequest, reply: Reply, *, run_id: str = "") -> Receipt:
    content = getattr(frame, frame.WhichOneof("frame") or "heartbeat")
    run_id = run_id or getattr(content, "run_id", "")
    return replies.receipt(reply, frame_id=_frame_id(frame), run_id=run_id, call_id=getattr(content, "call_id", ""))


def _frame_id(frame: SessionRequest) -> str:
    return frame.frame_id[:_FRAME_ID_CHARACTERS_MAX]
