"""The notifier as processes of a simulation, put together as its `__main__` does it, and what troubles them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from datetime import timedelta

from pawl.chassis.ids import IdSource
from pawl.chassis.lifecycle import Background
from pawl.errors import InvalidField
from pawl.notifier.adapters.webhook_sender import SignedPosts
from pawl.notifier.app.channels import Channels
from pawl.notifier.domain.channel import ChannelKind
from pawl.notifier.domain.delivery import ChannelEvent
from pawl.notifier.domain.notification import Notification
from pawl.notifier.wiring import wire
from tests.fakes.virtual_time import VirtualClock
from tests.simulation.channels import MemoryChannels, MemoryDeliveries
from tests.simulation.inboxes import MemoryInboxes, MemoryPreferences
from tests.simulation.lifecycle import Stream
from tests.simulation.process import Process
from tests.simulation.receivers import Receivers, WayOut
from tests.simulation.store import Database
from tests.simulation.world import CHAOS_SECONDS, World

_PLAYED = 0.4
_BATCH = 16
_FAILURE_RATE = 0.03
_LOOK_SECONDS = 0.25
_ROUND_SECONDS = 3.0
_ROUNDS_MAX = 60


class _Bus:
    """See the notifier's `ports.Announcer`: what it is told, the rows keep."""

    async def announce(self, notifications: Sequence[Notification]) -> None: ...

    async def tell(self, events: Sequence[ChannelEvent]) -> None: ...


class _NoServices:
    """See the notifier's `ports.Services`."""

    async def check(self, url: str) -> None:
        raise InvalidField("the deployment allows no service", field="channel.url")


class _Uncounted:
    """See the notifier's `ports.Counters`."""

    def event_taken(self, outcome: str) -> None: ...

    def published(self, count: int) -> None: ...

    def watching(self, count: int) -> None: ...

    def delivery_tried(self, kind: str, state: str, seconds: float) -> None: ...

    def deliveries_waiting(self, kind: str, count: int, delay_seconds: float) -> None: ...


class NotifierProcess:
    """One process of the notifier."""

    def __init__(self, process: Process, world: World, stream: Stream, receivers: Receivers) -> None:
        self.process = process
        self._stream = stream
        draw = world.chance.stream("notifier", process.name)
        database = Database(world.tables, world.chance, world.history, process.name, failure_rate=_FAILURE_RATE)
        egress, clock, ids = WayOut(receivers, process), VirtualClock(), IdSource(VirtualClock(), draw.getrandbits)
        self.inboxes = MemoryInboxes(database, lambda: process.alive)
        self.preferences = MemoryPreferences(database)
        self.repository = MemoryChannels(database)

        def secret(size: int) -> bytes:
            receivers.secrets.append(draw.randbytes(size))
            return receivers.secrets[-1]

        self._parts = wire(
            store=self.inboxes,
            channels=self.repository,
            queue=MemoryDeliveries(database),
            preferences=self.preferences,
            senders={ChannelKind.WEBHOOK: SignedPosts(egress, clock)},
            sends_email=False,
            services=_NoServices(),
            egress=egress,
            announcer=_Bus(),
            counters=_Uncounted(),
            clock=clock,
            ids=ids,
            keep_days=30,
            chance=draw.random,
        )
        self.channels = Channels(
            self.repository,
            egress,
            _NoServices(),
            clock,
            ids,
            sends_email=False,
            on_due=self._parts.deliveries.wake,
            random_bytes=secret,
        )
        self.stop = asyncio.Event()

    async def serve(self) -> None:
        """Serve until `stop`, then give back what was claimed."""
        async with Background() as background:
            background.start("intake", self._take)
            for name, loop in self._parts.loops.items():
                background.start(name, loop)
            await self.stop.wait()

    async def _take(self) -> None:
        while True:
            deliveries = self._stream.take(_BATCH)
            if deliveries:
                await self._parts.intake.take(deliveries)
            else:
                await asyncio.sleep(_LOOK_SECONDS)


class Notifiers:
    """All replicas of the notifier, in the seeds that have them, and the trouble that they have."""

    def __init__(self, world: World, *, may_play: bool) -> None:
        self.is_played = may_play and world.chance.stream("notifier").random() < _PLAYED
        self.receivers = Receivers(world.chance, world.history)
        self.replicas: list[NotifierProcess] = []
        self.world = world
        self._stream = Stream(world.tables, world.broker, world.chance)
        self._numbers = itertools.count(1)
        self._draw = world.chance.stream("notifier trouble")

    def start(self) -> list[asyncio.Task[None]]:
        """Start one or two replicas; returns what else has to run."""
        if not self.is_played:
            return []
        for _ in range(self._draw.choice([1, 2, 2])):
            self._start_one()
        return [asyncio.get_running_loop().create_task(self._stream.relay())]

    def _start_one(self) -> None:
        process = Process(f"notifier-{next(self._numbers)}")
        self.world.processes.append(process)
        self.world.history.tell(f"start {process.name}")
        self.replicas.append(NotifierProcess(process, self.world, self._stream, self.receivers))
        process.spawn(self.replicas[-1].serve())

    async def make_trouble(self) -> None:
        """Kill, stop and freeze replicas for a while, in the seeds that have them."""
        loop = asyncio.get_running_loop()
        end = loop.time() + CHAOS_SECONDS
        while self.is_played and loop.time() < end:
            await asyncio.sleep(min(self._draw.expovariate(1 / 2.0), end - loop.time()))
            self._trouble_one()

    def _trouble_one(self) -> None:
        draw, strikes = self._draw, self.world.chance.strikes
        replica = draw.choice([replica for replica in self.replicas if replica.process.alive])
        seconds = draw.choice([0.5, 2.0, 8.0, 15.0]) * (0.5 + draw.random())
        if strikes(draw, "notifier killed", 0.2):
            self.world.history.tell(f"kill {replica.process.name}")
            replica.process.kill()
            self._start_one()
        elif strikes(draw, "notifier frozen", 0.1):
            self.world.history.tell(f"freeze {replica.process.name} for {seconds:.2f}")
            replica.process.freeze()
            asyncio.get_running_loop().call_later(seconds, replica.process.thaw)
        elif strikes(draw, "notifier stopped", 0.1):
            self.world.history.tell(f"stop {replica.process.name}")
            replica.stop.set()
            self._start_one()
            asyncio.get_running_loop().call_later(3.0, replica.process.kill)

    async def settle(self) -> None:
        """Let the days pass in which deliveries are tried, without those who have nothing to do any more."""
        if not self.is_played:
            return
        own = {replica.process for replica in self.replicas}
        for process in self.world.processes:
            if process not in own:
                process.freeze()
        rows, server = self.world.tables.notifier, self.world.tables.server
        clock = Database(self.world.tables, self.world.chance, self.world.history, "clock")
        for _ in range(_ROUNDS_MAX):
            await asyncio.sleep(_ROUND_SECONDS)
            waiting = [row.due_time for row in rows.deliveries.values() if row.due_time is not None]
            if self._stream.is_done and not waiting and not rows.events:
                return
            ahead = max(waiting, default=clock.now()) - clock.now()
            server.ahead_seconds += max(ahead, timedelta()).total_seconds()
