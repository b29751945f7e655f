"""Live events that a test can drop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pawl.agent_loop.api.live import BusEvents
from pawl.chassis.ids import StoreId, UserId
from pawl.event.v1 import event_pb2

Take: TypeAlias = Callable[[Sequence[bytes], event_pb2.RunEvent], Awaitable[None]]


class FakeLive(BusEvents):
    """Live events. `connected = False` stops them, and `lose` selects events to drop."""

    connected = True

    def __init__(self) -> None:
        self.lose: Callable[[int], bool] = lambda _seq: False
        self.takers: defaultdict[str, list[Take]] = defaultdict(list)
        self.subscriptions = 0
        self.inboxes: list[Callable[[StoreId, UserId], None]] = []
        self.viewers: list[tuple[str, str, str]] = []
        self.ticks = 0

    async def subscribe(self, store_id: str, run_id: str, take: Take) -> Any:
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
