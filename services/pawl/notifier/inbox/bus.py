"""News on NATS that every replica hears: notifications of all of them, and who has seen which run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from itertools import chain
from typing import Final

import msgspec

from pawl.chassis.bus.connection import Bus
from pawl.chassis.ids import RunId, StoreId, UserId, is_id
from pawl.chassis.process import logs
from pawl.errors import Unavailable
from pawl.notifier.inbox.rules import Inbox

_ALL: Final = "pawl.v1.*.user.*.notifications"
_VIEWERS: Final = "pawl.internal.v1.viewers"

_log = logs.get_logger(__name__)


async def hear(bus: Bus, wake: Callable[[Inbox], None]) -> None:
    """Call `wake` for each notification that any replica publishes."""

    async def on_message(subject: str, _data: bytes) -> None:
        _, _, store_id, _, user_id, _ = subject.split(".")
        wake(Inbox(store_id=StoreId(store_id), user_id=UserId(user_id)))

    await bus.subscribe(_ALL, on_message)


async def hear_viewers(bus: Bus, note: Callable[[Collection[tuple[Inbox, RunId]]], Awaitable[None]]) -> None:
    """Give `note` which users have just seen which runs, as agent-loop reports; what cannot be noted is lost."""

    async def on_message(_subject: str, data: bytes) -> None:
        try:
            said = msgspec.json.decode(data, type=list[tuple[StoreId, UserId, RunId]])
            viewers = [(Inbox(store_id=store, user_id=user), run) for store, user, run in said]
            if viewers and all(map(is_id, chain.from_iterable(said))):
                await note(viewers)
        except (msgspec.DecodeError, Unavailable) as error:
            _log.debug("viewers.not_noted", error=type(error).__name__)

    await bus.subscribe(_VIEWERS, on_message)
