"""Live events that a test can drop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pawl.agent_loop.api.live import BusEvents
from pawl.chassis.ids import StoreId, UserId
from pawl.event.v1 import event_pb2


class FakeLive(BusEvents):
    """Live events. `connected = False` stops them; `lose` is a predicate for events to drop."""

    connected = True

    def __init__(self) -> None:
        self.lose: Callable[[int], bool] = lambda _seq: False
        self.takers: defaultdict[str, list[Callable[[event_pb2.RunEvent], Awaitable[None]]]] = defaultdict(list)
        self.subscriptions = 0
        self.inboxes: list[Callable[[StoreId, UserId], None]] = []
        self.viewers: list[tuple[str, str, str]] = []
        self.ticks = 0

    async def subscribe(self, store_id: str, run_id: str, take: Callable[[event_pb2.RunEvent], Awaitable[None]]) -> Any:
        self.subscriptions += 1
        self.takers[run_id].append(take)
        return FakeSubscription(self, run_id, take)

    async def subscribe_inboxes(self, changed: Callable[[StoreId, UserId], None]) -> Any:
        self.inboxes.append(changed)
        return FakeSubscription(self, "", _nothing)

    async def report_viewers(self, viewers: Sequence[tuple[str, str, str]]) -> None:
        self.viewers += viewers
        self.ticks += 1

    @property
    def subscriber_count(self) -> int:
        return sum(len(takers) for takers in self.takers.values())

    async def publish(self, event: event_pb2.RunEvent) -> None:
        if self.connected and not self.lose(event.seq):
            for take in list(self.takers[event.run_id]):
                await take(event_pb2.RunEvent.FromString(event.SerializeToString()))


async def _nothing(_event: event_pb2.RunEvent) -> None: ...


@dataclass(slots=True)
class FakeSubscription:
    live: FakeLive
    run_id: str
    take: Callable[[event_pb2.RunEvent], Awaitable[None]]

    async def unsubscribe(self) -> None:
        if self.take in self.live.takers[self.run_id]:
            self.live.takers[self.run_id].remove(self.take)
