"""A bounded queue of messages waiting to be written to NATS."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from pawl.chassis.process import logs
from pawl.server.process.metrics import Metrics

BYTES_MAX: Final = 16 * 1024 * 1024
_MESSAGES_MAX: Final = 10_000

_log = logs.get_logger(__name__)


class Outbox:
    """Accepts messages without waiting, and sends them in order on the current connection.

    `send` runs in its own task, because nats-py's `publish` can wait for the network and swallows a cancellation that
    arrives while it waits.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.messages: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(_MESSAGES_MAX)
        self._queued_bytes = 0
        self.published = metrics.counter("bus_published_total", "Messages handed to NATS.")
        self._dropped = metrics.counter("bus_dropped_total", "Messages not published.", ("cause",))

    def put(self, subject: str, data: bytes) -> None:
        """Queue a message, or drop and count it if the outbox is full."""
        if self.messages.full() or self._queued_bytes + len(data) > BYTES_MAX:
            self._dropped.labels("full").inc()
            return
        self._queued_bytes += len(data)
        self.messages.put_nowait((subject, data))

    def drop(self) -> None:
        """Count a message that was dropped because NATS is not connected."""
        self._dropped.labels("disconnected").inc()

    def refuse(self, subject: str, error: str) -> None:
        """Count and log a message that can never be sent."""
        self._dropped.labels("refused").inc()
        _log.warning("bus.refused", subject=subject, error=error)

    def clear(self) -> None:
        while not self.messages.empty():
            self.messages.get_nowait()
            self.messages.task_done()
            self.drop()
        self._queued_bytes = 0

    async def send(self, client: Client) -> None:
        while True:
            subject, data = await self.messages.get()
            self._queued_bytes -= len(data)
            try:
                await client.publish(subject, data)
            except nats.errors.ConnectionClosedError:
                self.drop()
                return
            except (nats.errors.Error, ValueError) as error:
                # This message cannot be sent (too large, bad subject), but the next one may.
                self.refuse(subject, type(error).__name__)
            else:
                self.published.inc()
            finally:
                self.messages.task_done()


# Receives the subject and the data of a message.
Callback = Callable[[str, bytes], Awaitable[None]]


class Subscription:
    """A subscription that survives reconnects."""

    def __init__(self, subject: str, callback: Callback, forget: Callable[[Subscription], object]) -> None:
        self.subject = subject
        self._callback = callback
        self._forget = forget
        self._current: NatsSubscription | None = None

    async def unsubscribe(self) -> None:
        """Stop receiving messages. Idempotent."""
        self._forget(self)
        current, self._current = self._current, None
        if current is not None:
            try:
                await current.unsubscribe()
            except nats.errors.Error:
                return  # The subscription ended with the connection.

    async def establish(self, client: Client) -> None:
        self._current = await client.subscribe(self.subject, cb=self._deliver)

    async def _deliver(self, msg: Msg) -> None:
        try:
            await self._callback(msg.subject, msg.data)
        except Exception:  # noqa: BLE001  # one bad message must not end the subscription
            _log.exception("bus.callback_failed", subject=self.subject)
