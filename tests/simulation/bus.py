"""A simulated NATS: messages may be lost, duplicated, delayed or reordered, and an outage drops them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pawl.server.bus.outbox import Callback
from tests.simulation.chance import Chance
from tests.simulation.process import Process

_WAY_SECONDS = 0.002
_LATE_SECONDS = 3.0


@dataclass
class Broker:
    chance: Chance
    absent: bool = False
    subscriptions: dict[SimulatedSubscription, None] = field(default_factory=dict)


class SimulatedSubscription:
    def __init__(self, broker: Broker, process: Process, subject: str, callback: Callback) -> None:
        self.process = process
        self.subject = subject
        self.callback = callback
        self._broker = broker

    async def unsubscribe(self) -> None:
        self._broker.subscriptions.pop(self, None)


class SimulatedBus:
    def __init__(self, broker: Broker, process: Process) -> None:
        self._broker = broker
        self._process = process
        self._draw = broker.chance.stream("bus", process.name)

    @property
    def connected(self) -> bool:
        return not self._broker.absent

    async def publish(self, subject: str, data: bytes) -> None:
        if self._broker.absent:
            return
        loop, strikes = asyncio.get_running_loop(), self._broker.chance.strikes
        for subscription in list(self._broker.subscriptions):
            if subscription.subject != subject or not subscription.process.alive:
                continue
            if strikes(self._draw, "wake-up lost", 0.1):
                continue
            for _ in range(2 if strikes(self._draw, "wake-up doubled", 0.1) else 1):
                late = _LATE_SECONDS * self._draw.random() if strikes(self._draw, "wake-up late", 0.1) else 0.0
                loop.call_later(_WAY_SECONDS + late, self._deliver, subscription, subject, data)

    async def subscribe(self, subject: str, callback: Callback) -> SimulatedSubscription:
        subscription = SimulatedSubscription(self._broker, self._process, subject, callback)
        self._broker.subscriptions[subscription] = None
        return subscription

    def _deliver(self, subscription: SimulatedSubscription, subject: str, data: bytes) -> None:
        if subscription in self._broker.subscriptions and subscription.process.alive:
            subscription.process.spawn(_call(subscription.callback, subject, data), "bus")


async def _call(callback: Callback, subject: str, data: bytes) -> None:
    await callback(subject, data)
