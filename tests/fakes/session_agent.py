"""A small AgentService whose replicas share their data and can break a stream at a chosen time.

Its authenticator needs no key, and a test can drop its live events. tests/system tests the same frames with real
processes.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import grpc

from pawl.agent.v1 import agent_pb2_grpc, session_pb2, types_pb2
from pawl.agent_loop.api.live import BusEvents
from pawl.chassis.identity.auth import Principal, local_principal
from pawl.chassis.identity.roles import AGENT_LOOP, MAILBOX, TOOL_REGISTRY
from pawl.chassis.ids import ConversationId, StoreId, UserId
from pawl.chassis.rpc.status import abort
from pawl.client.session import FRAME_BYTES_MAX
from pawl.errors import PawlError
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2, run_pb2
from pawl.server.identity.credentials import KeyAuthenticator

RUN = "run_1"


@dataclass(slots=True)
class Book:
    events: list[event_pb2.RunEvent] = field(default_factory=list)
    ended: bool = False
    trimmed_seq: int = 0
    offers: list[session_pb2.Offer] = field(default_factory=list)
    frames: list[session_pb2.SessionRequest] = field(default_factory=list)
    receipts: dict[str, types_pb2.Receipt] = field(default_factory=dict)
    refusals: dict[str, types_pb2.Receipt] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def append(self, count: int, *, ended: bool = False) -> None:
        async with self.changed:
            for _ in range(count):
                event = event_pb2.RunEvent(run_id=RUN, conversation_id="conv_1", seq=len(self.events) + 1)
                event.output_delta.text = f"{event.seq} "
                self.events.append(event)
            self.ended = ended
            self.changed.notify_all()

    async def offer(self, call_id: str, tool: str, arguments: bytes = b"{}", *, epoch: int = 1) -> None:
        async with self.changed:
            call = call_pb2.Call(run_id=RUN, call_id=call_id, tool_name=tool, arguments_json=arguments)
            self.offers = [offer for offer in self.offers if offer.call.call_id != call_id]
            self.offers.append(session_pb2.Offer(call=call, offer_epoch=epoch))
            self.changed.notify_all()

    async def until(self, condition: Callable[[Book], bool]) -> None:
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: condition(self))

    def sent(self, kind: str) -> list[session_pb2.SessionRequest]:
        return [frame for frame in self.frames if frame.WhichOneof("frame") == kind]

    def take(self, frame: session_pb2.SessionRequest) -> types_pb2.Receipt:
        before = self.receipts.get(frame.frame_id)
        if before is not None:
            return types_pb2.Receipt(
                frame_id=frame.frame_id, status=types_pb2.RECEIPT_STATUS_DUPLICATE, run_id=before.run_id
            )
        kind = frame.WhichOneof("frame") or ""
        receipt = types_pb2.Receipt(status=types_pb2.RECEIPT_STATUS_ACCEPTED, run_id=RUN)
        receipt.MergeFrom(self.refusals.get(kind, types_pb2.Receipt()))
        receipt.frame_id = frame.frame_id
        self.receipts[frame.frame_id] = receipt
        self.frames.append(frame)
        return receipt


class Replica(agent_pb2_grpc.AgentServiceServicer):
    """One replica of the service.

    It applies the next frame of the kind `break_before_receipt` and ends its stream without a receipt.
    """

    def __init__(self, book: Book) -> None:
        self.book = book
        self.break_before_receipt = ""
        self.break_after_events = 0
        self.refuse: grpc.StatusCode | PawlError | None = None
        self.hellos: list[session_pb2.Hello] = []
        self._streams: set[asyncio.Task[Any]] = set()

    def cut(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def Session(  # type: ignore[override]
        self, requests: AsyncIterator[session_pb2.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        if isinstance(self.refuse, PawlError):
            await abort(context, self.refuse)
        if self.refuse is not None:
            await context.abort(self.refuse, "no")
        hello = (await anext(requests)).hello
        self.hellos.append(hello)
        await context.write(session_pb2.SessionResponse(welcome=session_pb2.Welcome(client_id=hello.client_id)))
        stream = _Stream(self, context)
        tasks = {asyncio.create_task(stream.read(requests)), asyncio.create_task(stream.send())}
        self._streams |= tasks
        _, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._streams -= tasks
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the replica is gone")


class _Stream:
    def __init__(self, replica: Replica, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._replica = replica
        self._book = replica.book
        self._context = context
        self._next: int | None = None
        self._offered: dict[str, int] = {}
        self._events_sent = 0

    async def read(self, requests: AsyncIterator[session_pb2.SessionRequest]) -> None:
        async for frame in requests:
            kind = frame.WhichOneof("frame") or ""
            receipt = self._book.take(frame)
            if kind == self._replica.break_before_receipt:
                self._replica.break_before_receipt = ""
                return
            await self._context.write(session_pb2.SessionResponse(receipt=receipt))
            async with self._book.changed:
                if kind in {"start", "attach"} and receipt.status != types_pb2.RECEIPT_STATUS_REFUSED:
                    self._next = frame.attach.after_seq
                self._book.changed.notify_all()

    async def send(self) -> None:
        while True:
            async with self._book.changed:
                await self._book.changed.wait_for(lambda: self._news() is not None)
                frame = self._news()
            assert frame is not None
            if frame.HasField("offer"):
                self._offered[frame.offer.call.call_id] = frame.offer.offer_epoch
            else:
                self._next = None if frame.HasField("end") else frame.gap.to_seq or frame.event.seq
            self._events_sent += frame.HasField("event")
            await self._context.write(frame)
            if self._events_sent == self._replica.break_after_events > 0:
                self._replica.break_after_events = 0
                return

    def _news(self) -> session_pb2.SessionResponse | None:
        offers = (each for each in self._book.offers if self._offered.get(each.call.call_id, 0) < each.offer_epoch)
        if (offer := next(offers, None)) is not None:
            return session_pb2.SessionResponse(offer=offer)
        if self._next is None:
            return None
        if self._next < self._book.trimmed_seq:
            gap = gap_pb2.Gap(run_id=RUN, from_seq=self._next + 1, to_seq=self._book.trimmed_seq)
            return session_pb2.SessionResponse(gap=gap)
        if self._next < len(self._book.events):
            return session_pb2.SessionResponse(event=self._book.events[self._next])
        if self._book.ended:
            end = session_pb2.End(run_id=RUN, last_seq=self._next, state=run_pb2.RUN_STATE_COMPLETED)
            return session_pb2.SessionResponse(end=end)
        return None


@asynccontextmanager
async def serve(replica: Replica) -> AsyncIterator[str]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", FRAME_BYTES_MAX)])
    agent_pb2_grpc.add_AgentServiceServicer_to_server(replica, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        replica.cut()
        await server.stop(None)


class OpenAuthenticator(KeyAuthenticator):
    """Accepts every caller as the user in the metadata, with the permissions of a service."""

    async def authenticate(
        self, metadata: Mapping[str, str], *, source: str, may_look_up: Callable[[], bool] = lambda: True
    ) -> Principal:
        principal = local_principal(metadata)
        return replace(principal, rights=principal.rights | {AGENT_LOOP, MAILBOX, TOOL_REGISTRY})


Take: TypeAlias = Callable[[Sequence[bytes], event_pb2.RunEvent], Awaitable[None]]


class FakeLive(BusEvents):
    """Live events. `connected = False` stops them, and `lose` selects events to drop."""

    connected = True

    def __init__(self) -> None:
        self.lose: Callable[[int], bool] = lambda _seq: False
        self.takers: defaultdict[str, list[Take]] = defaultdict(list)
        self.subscriptions = 0
        self.inboxes: list[Callable[[StoreId, UserId], None]] = []
        self.conversations: list[Callable[[StoreId, ConversationId], None]] = []
        self.viewers: list[tuple[str, str, str]] = []
        self.ticks = 0

    async def subscribe(self, store_id: str, run_id: str, take: Take) -> Any:
        self.subscriptions += 1
        self.takers[run_id].append(take)
        return FakeSubscription(self, run_id, take)

    async def subscribe_inboxes(self, changed: Callable[[StoreId, UserId], None]) -> Any:
        self.inboxes.append(changed)
        return FakeSubscription(self, "", _nothing)

    async def subscribe_conversations(self, changed: Callable[[StoreId, ConversationId], None]) -> Any:
        self.conversations.append(changed)
        return FakeSubscription(self, "", _nothing)

    async def report_viewers(self, viewers: Sequence[tuple[str, str, str]]) -> None:
        self.viewers += viewers
        self.ticks += 1

    @property
    def subscriber_count(self) -> int:
        return sum(len(takers) for takers in self.takers.values())

    async def publish(self, *events: event_pb2.RunEvent) -> None:
        if self.connected and not self.lose(events[-1].seq):
            for take in list(self.takers[events[-1].run_id]):
                await take([event.SerializeToString() for event in events], events[-1])


async def _nothing(_events: Sequence[bytes], _last: event_pb2.RunEvent) -> None: ...


@dataclass(slots=True)
class FakeSubscription:
    live: FakeLive
    run_id: str
    take: Take

    async def unsubscribe(self) -> None:
        if self.take in self.live.takers[self.run_id]:
            self.live.takers[self.run_id].remove(self.take)
