"""The messages and the handle that a subscriber of the bus gets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from pawl.chassis import logs

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message as a subscriber gets it."""

    subject: str
    data: bytes
    headers: Mapping[str, str]


Callback = Callable[[Message], Awaitable[None]]


class Subscription:
    """Interest in a subject that outlives connections."""

    def __init__(self, subject: str, queue: str, callback: Callback, forget: Callable[[Subscription], None]) -> None:
        self.subject = subject
        self.queue = queue
        self._callback = callback
        self._forget = forget
        self._current: NatsSubscription | None = None

    async def unsubscribe(self) -> None:
        """Get no more messages. Idempotent."""
        self._forget(self)
        current, self._current = self._current, None
        if current is not None:
            try:
                await current.unsubscribe()
            except nats.errors.Error:
                return  # The connection is gone, and the subscription with it.

    async def establish(self, client: Client) -> None:
        """Subscribe on a new connection."""
        self._current = await client.subscribe(self.subject, queue=self.queue, cb=self._deliver)

    async def _deliver(self, msg: Msg) -> None:
        message = Message(subject=msg.subject, data=msg.data, headers=msg.headers or {})
        try:
            await self._callback(message)
        except Exception:  # noqa: BLE001  # one bad message must not end the subscription
            _log.exception("bus.callback_failed", subject=self.subject)
