"""The handle that a subscriber of the bus gets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from pawl.chassis.process import logs

_log = logs.get_logger(__name__)


Callback = Callable[[str, bytes], Awaitable[None]]
"""Takes the subject and the data of a message."""


class Subscription:
    """Interest in a subject that outlives connections."""

    def __init__(self, subject: str, callback: Callback, forget: Callable[[Subscription], object]) -> None:
        self.subject = subject
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
        self._current = await client.subscribe(self.subject, cb=self._deliver)

    async def _deliver(self, msg: Msg) -> None:
        try:
            await self._callback(msg.subject, msg.data)
        except Exception:  # noqa: BLE001  # one bad message must not end the subscription
            _log.exception("bus.callback_failed", subject=self.subject)
