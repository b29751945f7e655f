"""200 watchers of one run on two replicas, who come, go, stall and come back: everyone has the log, byte for byte."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from pawl.agent.v1 import agent_pb2, session_pb2
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.agent_loop.app.session_stream import SessionTimes
from pawl.agent_loop.app.watch import Watches
from pawl.agent_loop.domain.options import RunDefaults
from pawl.agent_loop.rpc.servicer import HEARTBEAT_SECONDS
from pawl.agent_loop.wiring import ClientSide, ClientTimes
from pawl.chassis.ids import IdSource, RunId
from pawl.chassis.status import from_rpc_error
from pawl.errors import SlowConsumer
from pawl.event.v1 import event_pb2, run_pb2
from tests.fakes import virtual_time
from tests.fakes.agents import MemoryAgents
from tests.fakes.checker import FakeChecker
from tests.fakes.live_events import FakeLive
from tests.fakes.manual_clock import ManualClock
from tests.poll import until
from tests.rpc.agent_loop.client import Client
from tests.rpc.agent_loop.conftest import ME, new_server
from tests.rpc.agent_loop.ledger import ME as CALLER
from tests.rpc.agent_loop.ledger import PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub

_ROUNDS = 40
_BURST_ROUND = 4
_BURST_EVENTS = 30
_BURST_TEXT = "x" * 50_000


class Replicas:
    """Two servers with nothing in common but the ledger and the live events."""

    def __init__(self, ledger: PlayedLedger, live: FakeLive, clock: ManualClock, ids: IdSource) -> None:
        self.ledger = ledger
        self.live = live
        self._clock = clock
        self._ids = ids
        self.watches: list[Watches] = []
        self.stubs: list[AgentServiceAsyncStub] = []

    async def start(self, stack: AsyncExitStack, address: str) -> None:
        clients = ClientSide(
            ledger=self.ledger,
            live=self.live,
            agents=MemoryAgents(),
            checker=FakeChecker(),
            tools=FakeChecker(),
            documents=FakeChecker(),
            clock=self._clock,
            ids=self._ids,
            defaults=RunDefaults(model="the-model"),
            times=ClientTimes(poll_seconds=0.05, connected_poll_seconds=0.05),
        )
        watches = await stack.enter_async_context(clients.watches)
        server = await stack.enter_async_context(new_server(clients, address, self._ids))
        # Buffers of the size they begin with: else the client's gRPC takes in what its program does not read.
        options = [("grpc.http2.bdp_probe", 0)]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address, options=options))
        self.watches.append(watches)
        self.stubs.append(AgentServiceStub(channel))


class Watcher:
    """A client that keeps what it sees; it goes on on whichever replica, after what it has or where it is told to."""

    def __init__(self, replicas: Replicas, choose: random.Random, after_seq: int) -> None:
        self.replicas = replicas
        self.choose = choose
        self.after_seq = after_seq
        self.seen: list[event_pb2.RunEvent] = []
        self.stalled = asyncio.Event()
        self.cut_off = 0
        self._resume_after_seq = after_seq

    @property
    def has_all(self) -> bool:
        return bool(self.seen) and self.seen[-1].run_changed.run.state == run_pb2.RUN_STATE_COMPLETED

    def go_to(self, after_seq: int) -> None:
        """Begin there."""
        self.after_seq = self._resume_after_seq = after_seq

    def stub(self) -> AgentServiceAsyncStub:
        return self.choose.choice(self.replicas.stubs)

    async def come_and_go(self) -> None:
        """Leave after some events, again and again."""
        while not self.has_all:
            await self.watch(events_max=self.choose.choice([2, 10, 50, 1000]))

    async def stall(self, burst_is_over: asyncio.Event) -> None:
        """Stop reading until the run has gone far ahead, then read what is left of the stream and attach again."""
        await self.watch(events_max=3, stall_until=burst_is_over)
        # It may have been too slow already.
        self.stalled.set()
        while not self.has_all:
            await self.watch(events_max=1000)

    async def watch(self, *, events_max: int, stall_until: asyncio.Event | None = None) -> None:
        """Watch for so many events, then leave, or stop reading for a while."""
        request = agent_pb2.WatchRunRequest(run_id="run_1", after_seq=self._resume_after_seq)
        call = self.stub().WatchRun(request, metadata=ME)
        count = 0
        with self._perhaps_cut_off():
            async for response in call:
                for event in response.events:
                    self._see(event)
                count += len(response.events)
                if count >= events_max and stall_until is None:
                    break
                if count >= events_max and stall_until is not None and not self.stalled.is_set():
                    self.stalled.set()
                    await stall_until.wait()
        call.cancel()

    async def attach(self) -> None:
        """The same over sessions, whose stream carries everything else that a client does."""
        while not self.has_all:
            client = Client(self.stub())
            with self._perhaps_cut_off():
                await client.hello(f"cli_{self.choose.randrange(10**9)}")
                await client.ask(attach=session_pb2.Attach(run_id="run_1", after_seq=self._resume_after_seq))
                while (frame := await client.next("event", "end")).HasField("event"):
                    self._see(frame.event)
            client.leave()

    @contextmanager
    def _perhaps_cut_off(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            refused = from_rpc_error(error)
            assert isinstance(refused, SlowConsumer), refused
            # No hole: it may have more, the message that was being written.
            too_many = self._resume_after_seq - int(refused.metadata["resume_after_seq"])
            assert 0 <= too_many <= 64
            self._resume_after_seq -= too_many
            self.cut_off += 1

    def _see(self, event: event_pb2.RunEvent) -> None:
        assert event.seq == self._resume_after_seq + 1
        self._resume_after_seq = event.seq
        if event.seq > self.after_seq + len(self.seen):
            self.seen.append(event)


@pytest.fixture
async def replicas(
    ledger: PlayedLedger, live: FakeLive, clock: ManualClock, ids: IdSource, tmp_path: Path
) -> AsyncIterator[Replicas]:
    async with AsyncExitStack() as stack:
        replicas = Replicas(ledger, live, clock, ids)
        for number in range(2):
            await replicas.start(stack, f"unix:{tmp_path}/agent-{number}")
        yield replicas


async def test_200_watchers_have_one_sequence_and_leave_nothing_behind(replicas: Replicas) -> None:
    """EVT-1, EVT-3, I7, I19: 120 come and go, 40 use sessions, 40 stall in a burst and most are cut off."""
    choose = random.Random(1)
    ledger, live = replicas.ledger, replicas.live
    live.lose = lambda _seq: choose.random() < 0.05
    await ledger.add_run()
    watchers: list[Watcher] = []
    slow: list[Watcher] = []
    async with asyncio.TaskGroup() as group:

        def add(count: int) -> Iterable[Watcher]:
            for _ in range(count):
                after_seq = choose.randint(0, ledger.last_seq())
                watchers.append(Watcher(replicas, random.Random(choose.random()), after_seq))
                yield watchers[-1]

        for number in range(_ROUNDS):
            for watcher in add(3):
                group.create_task(watcher.come_and_go())
            for watcher in add(1):
                group.create_task(watcher.attach())
            if number == _BURST_ROUND:
                slow += await _burst(ledger, group, list(add(40)))
            await ledger.append(count=choose.randint(1, 3))
            await asyncio.sleep(choose.random() * 0.02)
        await ledger.finish()
    assert len(watchers) == 200
    log = ledger.log()
    assert [_hash(watcher.seen) for watcher in watchers] == [_hash(log[watcher.after_seq :]) for watcher in watchers]
    # Those who still read the past when the burst came go on at their own pace.
    assert sum(watcher.cut_off > 0 for watcher in slow) >= len(slow) // 2

    async def is_forgotten() -> bool:
        return live.subscriber_count == 0 and not any(watches.feed_count for watches in replicas.watches)

    await until(is_forgotten)


async def _burst(ledger: PlayedLedger, group: asyncio.TaskGroup, slow: list[Watcher]) -> list[Watcher]:
    """Let these watchers stall, and the run go on so far that none of them can have followed."""
    over = asyncio.Event()
    for watcher in slow:
        # From just before the end: whoever reads the past is not in a hurry, and is not cut off.
        watcher.go_to(ledger.last_seq() - 1)
        group.create_task(watcher.stall(over))
    for watcher in slow:
        while not watcher.stalled.is_set():
            await ledger.append()
            await asyncio.sleep(0.005)
    for _ in range(_BURST_EVENTS):
        await ledger.append(text=_BURST_TEXT)
        await asyncio.sleep(0)
    over.set()
    return slow


def _hash(events: Iterable[event_pb2.RunEvent]) -> str:
    digest = hashlib.sha256()
    for event in events:
        digest.update(event.SerializeToString(deterministic=True))
    return digest.hexdigest()


def test_a_silent_run_has_a_heartbeat_every_15_seconds() -> None:
    """EVT-3, by default, on both kinds of watching."""

    async def watch() -> list[float]:
        live = FakeLive()
        ledger = PlayedLedger(ManualClock(), live)
        await ledger.add_run()
        async with Watches(ledger=ledger, live=live) as watches, watches.open(CALLER, RunId("run_1"), 1) as watcher:
            loop = asyncio.get_running_loop()
            began, times = loop.time(), []
            events = watcher.pages(silence_seconds=HEARTBEAT_SECONDS)
            for _ in range(3):
                assert await anext(events) == ()
                times.append(round(loop.time() - began, 2))
            await events.aclose()
            return times

    assert virtual_time.run(watch()) == [15.0, 30.0, 45.0]
    assert SessionTimes().heartbeat_seconds == 15.0
