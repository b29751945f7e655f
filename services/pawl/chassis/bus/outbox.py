"""The messages that wait to be written to NATS, bounded in number and bytes."""

from __future__ import annotations

import asyncio
from typing import Final

import nats.errors
from nats.aio.client import Client

from pawl.chassis.process import logs
from pawl.chassis.process.metrics import Metrics

BYTES_MAX: Final = 16 * 1024 * 1024
_MESSAGES_MAX: Final = 10_000

_log = logs.get_logger(__name__)


class Outbox:
    """Takes messages without waiting, and sends them in order on the connection there is.

    nats-py's own publish may wait for the network, and swallows a cancellation
    that comes meanwhile; so it is called here, in a task of its own.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._messages: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(_MESSAGES_MAX)
        self._queued_bytes = 0
        self._published = metrics.counter("bus_published_total", "Messages handed to NATS.")
        self._dropped = metrics.counter("bus_dropped_total", "Messages not published.", ("cause",))

    def put(self, subject: str, data: bytes) -> None:
        """Queue a message; dropped and counted if too much is waiting."""
        if self._messages.full() or self._queued_bytes + len(data) > BYTES_MAX:
            self._dropped.labels("full").inc()
            return
        self._queued_bytes += len(data)
        self._messages.put_nowait((subject, data))

    def drop(self) -> None:
        """Count a message that came while there was no connection."""
        self._dropped.labels("disconnected").inc()

    def refuse(self, subject: str, error: str) -> None:
        """Count a message that can never be sent."""
        self._dropped.labels("refused").inc()
        _log.warning("bus.refused", subject=subject, error=error)

    def published(self, count: int) -> None:
        """Count messages that went out beside the queue."""
        self._published.inc(count)

    def clear(self) -> None:
        """Drop what is waiting: it was meant for a connection that is lost."""
        while not self._messages.empty():
            self._messages.get_nowait()
            self._messages.task_done()
            self.drop()
        self._queued_bytes = 0

    async def join(self) -> None:
        """Return when all that was queued has been handed to the client."""
        await self._messages.join()

    async def send(self, client: Client) -> None:
        """Hand messages to `client` as they come; returns when it is closed."""
        while True:
            subject, data = await self._messages.get()
            self._queued_bytes -= len(data)
            try:
                await client.publish(subject, data)
            except nats.errors.ConnectionClosedError:
                self.drop()
                return
            except (nats.errors.Error, ValueError) as error:
                # This message cannot be sent (too large, bad subject); the next one may.
                self.refuse(subject, type(error).__name__)
            else:
                self._published.inc()
            finally:
                self._messages.task_done()
