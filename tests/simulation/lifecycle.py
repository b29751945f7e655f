"""The stream of the life cycle: what the ledger has told, late, out of order, twice, lost and sent again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pawl.chassis.ids import RunKey
from pawl.event.v1 import event_pb2
from pawl.notifier.adapters.lifecycle import read_change
from pawl.notifier.domain.announcement import Change
from tests.simulation.bus import Broker
from tests.simulation.chance import Chance
from tests.simulation.store import Tables

_ANSWER_SECONDS = 10.0
"""Who has not answered in that time has died, and another one is given the event."""
_LATE_SECONDS = 5.0
_LOST_SECONDS = 25.0
_LOOK_SECONDS = 0.05


@dataclass(kw_only=True)
class Told:
    """An event in the stream, which can be taken from `free_at` on."""

    subject: str
    data: bytes
    free_at: float
    attempts: int = 0
    is_answered: bool = False


class Stream:
    """What all replicas of the notifier take from."""

    def __init__(self, tables: Tables, broker: Broker, chance: Chance) -> None:
        self._tables = tables
        self._broker = broker
        self._chance = chance
        self._draw = chance.stream("life cycle")
        self._events: list[Told] = []
        self._seen: set[tuple[str, str]] = set()
        self.rejected: list[Told] = []

    @property
    def is_done(self) -> bool:
        """Whether all that was told has been answered."""
        return len(self._seen) == len(self._tables.outbox) and all(told.is_answered for told in self._events)

    async def relay(self) -> None:
        """Put what the ledger tells into the stream, until cancelled."""
        while True:
            for key, (run, _) in list(self._tables.outbox.items()):
                if key not in self._seen and not self._broker.absent:
                    self._seen.add(key)
                    self._put(key[0], self._payload(run, key[1]))
            await asyncio.sleep(_LOOK_SECONDS)

    def _payload(self, run: RunKey, event_id: str) -> bytes:
        payloads = self._tables.events[run]
        return next(each for each in payloads if event_pb2.RunEvent.FromString(each).event_id == event_id)

    def _put(self, store_id: str, data: bytes) -> None:
        draw, strikes, now = self._draw, self._chance.strikes, asyncio.get_running_loop().time()
        subject = f"pawl.v1.{store_id}.lifecycle.run"
        late = _LATE_SECONDS * draw.random() if strikes(draw, "life-cycle event late", 0.2) else 0.0
        late = _LOST_SECONDS * draw.random() if strikes(draw, "life-cycle event lost at first", 0.05) else late
        self._events.append(Told(subject=subject, data=data, free_at=now + late))
        if strikes(draw, "life-cycle event doubled", 0.1):
            self._events.append(Told(subject=subject, data=data, free_at=now + _LATE_SECONDS * draw.random()))

    def take(self, most: int) -> list[StreamDelivery]:
        """Take events that nobody else is at, up to so many."""
        if self._broker.absent:
            return []
        now = asyncio.get_running_loop().time()
        found = [told for told in self._events if not told.is_answered and told.free_at <= now][:most]
        for told in found:
            told.attempts, told.free_at = told.attempts + 1, now + _ANSWER_SECONDS
        return [StreamDelivery(self, told) for told in found]

    def answer(self, told: Told) -> None:
        """Take an event out, unless the answer gets lost."""
        told.is_answered = told.is_answered or not self._chance.strikes(self._draw, "answer to the stream lost", 0.05)


class StreamDelivery:
    """See the notifier's `ports.Delivery`."""

    def __init__(self, stream: Stream, told: Told) -> None:
        self._stream = stream
        self._told = told

    @property
    def attempt(self) -> int:
        return self._told.attempts

    def read(self) -> Change | None:
        return read_change(self._told.subject, self._told.data)

    async def accept(self) -> None:
        self._stream.answer(self._told)

    async def retry(self, *, delay_seconds: float) -> None:
        self._told.free_at = asyncio.get_running_loop().time() + delay_seconds

    async def reject(self) -> None:
        self._told.is_answered = True
        self._stream.rejected.append(self._told)
