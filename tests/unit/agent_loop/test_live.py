"""A live event is accepted only if it is about the watched run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pawl.agent_loop.api.live import BusEvents
from pawl.chassis.ids import RunId, StoreId
from pawl.event.v1.event_pb2 import RunEvent, RunEvents


class Bus:
    deliver: Callable[[str, bytes], Awaitable[None]]

    async def subscribe(self, _subject: str, deliver: Callable[[str, bytes], Awaitable[None]]) -> None:
        self.deliver = deliver


async def test_only_valid_events_of_the_watched_run_are_accepted() -> None:
    bus: Any = Bus()
    taken: list[tuple[list[bytes], int]] = []

    async def take(events: Sequence[bytes], last: RunEvent) -> None:
        taken.append((list(events), last.seq))

    await BusEvents(bus).subscribe(StoreId("acme"), RunId("run_1"), take)
    own = [RunEvent(store_id="acme", run_id="run_1", seq=seq) for seq in (4, 5)]
    others = [RunEvent(store_id="acme", run_id="run_2", seq=6), RunEvent(store_id="other", run_id="run_1", seq=6)]
    for data in (*(RunEvents(events=[event]).SerializeToString() for event in others), b"", b"\xff", b"\x0a\x01\xff"):
        await bus.deliver("subject", data)
    await bus.deliver("subject", RunEvents(events=own).SerializeToString())
    assert taken == [([event.SerializeToString() for event in own], 5)]
