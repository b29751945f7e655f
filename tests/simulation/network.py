"""Calls between processes, and a simulated NATS. Messages may be lost, delayed, repeated or reordered.

A call may also fail before, during or after the work, and an outage of NATS drops its messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pawl.errors import DeadlineExceeded, DependencyUnavailable, Internal, PawlError
from pawl.server.bus.outbox import Callback
from tests.simulation.chance import Chance
from tests.simulation.history import History
from tests.simulation.process import Process

T = TypeVar("T")

DEADLINE_SECONDS = 10.0
_WAY_SECONDS = 0.002
_SLOW_SECONDS = 4.0
_SECOND_COPY_SECONDS = 6.0


class Network:
    def __init__(self, chance: Chance, history: History, caller: str) -> None:
        self._chance = chance
        self._history = history
        self._draw = chance.stream("network", caller)

    async def call(
        self,
        target: Process,
        what: str,
        work: Callable[[], Awaitable[T]],
        *,
        deadline_seconds: float | None = DEADLINE_SECONDS,
    ) -> T:
        """Call `work` on `target` and return its result.

        Raises:
            DependencyUnavailable: the target was unreachable, or its response was lost.
            DeadlineExceeded: no response arrived in time; the work may continue.
            Internal: the target failed before or after the work.
            PawlError: the error that the work raised.
        """
        draw = self._draw
        strikes = self._chance.strikes
        fails_before = strikes(draw, "request lost", 0.02)
        is_repeated = strikes(draw, "request doubled", 0.01)
        is_slow = strikes(draw, "request delayed", 0.02)
        fails_after = strikes(draw, "answer lost", 0.02)
        is_late = strikes(draw, "answer delayed", 0.02)
        fails_inside = strikes(draw, "failed inside", 0.02)
        is_done = draw.random() < 0.5
        pause = _WAY_SECONDS * (0.5 + draw.random()) + (_SLOW_SECONDS * draw.random() ** 2 if is_slow else 0.0)
        second_pause = _SECOND_COPY_SECONDS * draw.random() ** 2
        answer_delay = _SLOW_SECONDS * draw.random() ** 2 if is_late else 0.0
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        serving: list[asyncio.Task[None]] = []

        def lost() -> None:
            if not answer.done():
                answer.set_exception(DependencyUnavailable("the connection broke"))

        try:
            async with asyncio.timeout(deadline_seconds):
                await asyncio.sleep(pause)
                if fails_before or not target.alive:
                    raise DependencyUnavailable("the connection was refused")
                if fails_inside and not is_done:
                    raise Internal
                target.on_kill[lost] = None
                serving.append(target.spawn(self._serve(work, answer, what), what))
                if is_repeated:
                    target.spawn(self._serve_late(second_pause, work, what), what)
                result = await answer
                if answer_delay:
                    await asyncio.sleep(answer_delay)
        except TimeoutError:
            raise DeadlineExceeded(f"{what} took too long") from None
        except asyncio.CancelledError:
            for task in serving:
                task.cancel()
            raise
        finally:
            target.on_kill.pop(lost, None)
        if fails_inside:
            raise Internal
        if fails_after:
            raise DependencyUnavailable("the connection broke")
        return result

    async def _serve(self, work: Callable[[], Awaitable[T]], answer: asyncio.Future[T], what: str) -> None:
        try:
            result = await work()
        except PawlError as error:
            if not answer.done():
                answer.set_exception(error)
        except Exception as error:  # noqa: BLE001  # a fault of the program: told, and never hidden
            self._history.unexpected(what, error)
            if not answer.done():
                answer.set_exception(Internal())
        else:
            if not answer.done():
                answer.set_result(result)
        finally:
            if not answer.done():
                answer.cancel()
            elif not answer.cancelled():
                answer.exception()

    async def _serve_late(self, seconds: float, work: Callable[[], Awaitable[Any]], what: str) -> None:
        await asyncio.sleep(seconds)
        unused_answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await self._serve(work, unused_answer, what)


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
