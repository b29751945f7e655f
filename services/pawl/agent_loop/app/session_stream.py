"""One stream of one client, from its hello to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, assert_never

from pawl.agent_loop.app import frames
from pawl.agent_loop.app.frames import ClientFrame, Receipt, ServerFrame
from pawl.agent_loop.app.inbox import REFUSALS, Inbox, derived_id, refusal
from pawl.agent_loop.app.messages import Messages, SessionTools
from pawl.agent_loop.app.offers import Offers
from pawl.agent_loop.app.public_ports import PublicLedger
from pawl.agent_loop.app.public_values import ClientSession, LogGap, LoggedEvent, Reply, RunView
from pawl.agent_loop.app.watch import Watches
from pawl.chassis.auth import Principal
from pawl.chassis.clock import Clock
from pawl.chassis.ids import CallId, RequestId, RunId
from pawl.chassis.tasks import within
from pawl.errors import (
    Cancelled,
    DeadlineExceeded,
    HelloRequired,
    InvalidField,
    Overloaded,
    PawlError,
    SlowConsumer,
)
from pawl.values.command import CommandOutcome
from pawl.values.run import ENDED, RESTING

ATTACHMENTS_MAX: Final = 64

_OUTGOING_FRAMES_MAX: Final = 64
_OUTGOING_BYTES_MAX: Final = 1024 * 1024
_RELEASE_SECONDS: Final = 0.4

Send = Callable[[ServerFrame], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTimes:
    """The patience of a session, in seconds."""

    offer_lease_seconds: float = 30.0
    heartbeat_seconds: float = 15.0
    silence_max_seconds: float = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The dependencies that all streams of a replica share."""

    ledger: PublicLedger
    watches: Watches
    messages: Messages
    inbox: Inbox
    clock: Clock
    times: SessionTimes


class Outgoing(asyncio.Queue[ServerFrame]):
    """The frames that a client has yet to take; full with events of so many bytes, too: one has up to a mebibyte."""

    _events_bytes = 0

    def full(self) -> bool:
        return super().full() or self._events_bytes >= _OUTGOING_BYTES_MAX

    def _put(self, item: ServerFrame) -> None:
        super()._put(item)
        self._events_bytes += _size_bytes(item)

    def _get(self) -> ServerFrame:
        item = super()._get()
        self._events_bytes -= _size_bytes(item)
        return item


class Stream:
    """One stream, after its hello: its tasks, its attachments and the calls that its client holds."""

    def __init__(self, parts: Parts, caller: Principal, client: ClientSession, hello: frames.Hello, send: Send) -> None:
        self._parts = parts
        self._caller = caller
        self._client_id = client.client_id
        self._send = send
        self._outgoing = Outgoing(_OUTGOING_FRAMES_MAX)
        self._sent_seqs: dict[RunId, int] = {}
        self._attachments: dict[RunId, asyncio.Task[None]] = {}
        # Runs whose need of somebody, or end, was sent since the last frame of the client.
        self._unconfirmed: set[RunId] = set()
        self._tasks = asyncio.TaskGroup()
        self._heard_at = 0.0
        self._busy = False
        self._tools = SessionTools(client_id=client.client_id, definitions=hello.front_end_tools)
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

    async def serve(self, hello_frame_id: str, incoming: AsyncIterator[ClientFrame]) -> None:
        times = self._parts.times
        welcome = frames.Welcome(
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
            await self._outgoing.put(welcome)
            await self._outgoing.put(Receipt(frame_id=hello_frame_id, status=CommandOutcome.ACCEPTED))
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
        """Release what the client holds; if that takes long, the leases end by themselves."""
        await within(_RELEASE_SECONDS, self._offers.release_all())

    async def _write(self) -> None:
        heartbeat_seconds = self._parts.times.heartbeat_seconds
        while True:
            frame = await within(heartbeat_seconds, self._outgoing.get())
            if frame is None:
                await self._send(frames.ServerHeartbeat())
                continue
            await self._send(frame)
            if isinstance(frame, frames.Event):
                self._sent_seqs[frame.run_id] = frame.event.seq
                if frame.event.run_state in RESTING:
                    self._unconfirmed.add(frame.run_id)
            elif isinstance(frame, frames.Gap):
                self._sent_seqs[frame.run_id] = frame.gap.to_seq
            self._outgoing.task_done()

    async def _watch_over(self) -> None:
        """End a stream whose client is silent, or has opened another."""
        loop = asyncio.get_running_loop()
        silence_max_seconds = self._parts.times.silence_max_seconds
        while True:
            silent_seconds = 0.0 if self._busy else loop.time() - self._heard_at
            if silent_seconds >= silence_max_seconds:
                raise DeadlineExceeded(f"no frame came for {silence_max_seconds:g} s")
            if not await within(silence_max_seconds - silent_seconds, self.superseded.wait()):
                continue
            # The receipts that are due come first.
            await within(_RELEASE_SECONDS, self._outgoing.join())
            raise Cancelled("the client opened another stream: two programs need client ids of their own")

    async def _handle(self, frame: ClientFrame) -> None:
        """Answer one frame with one receipt.

        Raises:
            PawlError: no receipt can be given; the stream ends, and the frame can be sent again.
        """
        while self._unconfirmed:  # The client is there, so it has what was sent.
            self._parts.watches.confirm(self._caller, self._unconfirmed.pop())
        if isinstance(frame.content, frames.ClientHeartbeat):
            await self._offers.renew()
            return
        if isinstance(frame.content, frames.Hello):
            raise HelloRequired
        try:
            receipt = await self._receipt(frame)
        except REFUSALS as error:
            receipt = _receipt(frame, refusal(error))
        if receipt is not None:
            await self._outgoing.put(receipt)

    async def _receipt(self, frame: ClientFrame) -> Receipt | None:
        """Do what the frame asks; None where the receipt has been sent."""
        content = frame.content
        request_id = derived_id(self._client_id, frame.frame_id)
        caller, inbox, messages = self._caller, self._parts.inbox, self._parts.messages
        match content:
            case Exception():
                raise content
            case frames.Start():
                run = await messages.start(caller, request_id, content.message, self._tools)
                await self._attach(frame, run.run_id, 0)
                return None
            case frames.Attach():
                await self._attach(frame, content.run_id, content.after_seq)
                return None
            case frames.Detach():
                await self._detach(content.run_id, release=True)
                return _receipt(frame, Reply(outcome=CommandOutcome.ACCEPTED), run_id=content.run_id)
            case frames.ToolResult():
                return _receipt(frame, await self._submit(request_id, content))
            case frames.ToolProgress():
                client = self._offers.session_of(content.call_id)
                reply = await inbox.report_progress(caller, request_id, content, client)
                await self._offers.renew()
                return _receipt(frame, reply)
            case frames.CallDecision():
                return _receipt(frame, await inbox.decide(caller, request_id, content))
            case frames.Cancel():
                return _receipt(frame, await inbox.cancel(caller, request_id, content.run_id, content.reason))
            case frames.UserMessage():
                run, _ = await messages.send(caller, request_id, content)
                return _receipt(frame, Reply(outcome=CommandOutcome.ACCEPTED), run_id=run.run_id)
            case frames.Hello() | frames.ClientHeartbeat():
                raise HelloRequired
            case _:
                assert_never(content)

    async def _submit(self, request_id: RequestId, result: frames.ToolResult) -> Reply:
        if result.offer_epoch == 0:
            raise InvalidField("offer_epoch is the one that came with the offer", field="tool_result.offer_epoch")
        self._offers.submitting(result.call_id)
        outcome: CommandOutcome | None = None
        try:
            client = self._offers.session_of(result.call_id)
            reply = await self._parts.inbox.submit_result(self._caller, request_id, result, client)
            outcome = reply.outcome
        finally:
            self._offers.submitted(result.call_id, result.offer_epoch, outcome)
        return reply

    async def _attach(self, frame: ClientFrame, run_id: RunId, after_seq: int) -> None:
        """Attach, or attach again from another position; the receipt comes before the first event."""
        await self._detach(run_id, release=False)
        if len(self._attachments) >= ATTACHMENTS_MAX:
            raise Overloaded(f"a session is attached to at most {ATTACHMENTS_MAX} runs")
        attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = self._tasks.create_task(
            self._stream(frame, run_id, after_seq, attached), name=f"session.attachment {run_id}"
        )
        self._attachments[run_id] = task
        await attached

    async def _detach(self, run_id: RunId, *, release: bool) -> None:
        task = self._attachments.pop(run_id, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        if release:
            await self._offers.leave(run_id, release=True)

    async def _stream(self, frame: ClientFrame, run_id: RunId, after_seq: int, attached: asyncio.Future[None]) -> None:
        self._sent_seqs[run_id] = after_seq
        try:
            async with self._parts.watches.open(self._caller, run_id, after_seq) as watcher:
                run = await self._parts.ledger.get_run(self._caller, run_id)
                self._offers.adopt(run)
                await self._outgoing.put(_receipt(frame, Reply(outcome=CommandOutcome.ACCEPTED), run_id=run_id))
                if not attached.done():  # The stream ends in this moment.
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

    async def _show(self, run: RunView, after_seq: int, events: AsyncIterator[LoggedEvent | LogGap]) -> None:
        """Send the events of a run, and its end."""
        last_seq, state = after_seq, run.state
        async for event in events:
            if isinstance(event, LogGap):
                await self._outgoing.put(frames.Gap(run_id=run.run_id, gap=event))
                last_seq = event.to_seq
                continue
            await self._outgoing.put(frames.Event(run_id=run.run_id, event=event))
            last_seq, state = event.seq, event.run_state or state
            if event.call is not None and event.seq > run.last_seq:
                self._offers.see(event.call)
        ended = state if state in ENDED else run.state
        await self._outgoing.put(frames.End(run_id=run.run_id, last_seq=last_seq, state=ended))


def _size_bytes(frame: ServerFrame) -> int:
    return frame.event.size_bytes if isinstance(frame, frames.Event) else 0


def _receipt(frame: ClientFrame, reply: Reply, *, run_id: RunId = RunId("")) -> Receipt:
    content = frame.content
    run_id = run_id or getattr(content, "run_id", RunId(""))
    return Receipt.of(reply, frame_id=frame.frame_id, run_id=run_id, call_id=getattr(content, "call_id", CallId("")))
