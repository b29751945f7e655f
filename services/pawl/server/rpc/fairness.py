"""Fair queues and slots. A slow or busy key (a store) delays only its own work."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class FairQueue(Generic[K, T]):
    """A queue that serves its keys in turn. The items of one key stay in order.

    A key with many items delays only its own items. The first item of a key waits for at most one item of every other
    key.
    """

    def __init__(self) -> None:
        self._queues: dict[K, deque[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, key: K, item: T) -> None:
        self._queues.setdefault(key, deque()).append(item)
        self._count += 1

    def next_key(self) -> K:
        """Return the key whose turn it is. Raises LookupError if the queue is empty."""
        if not self._queues:
            raise LookupError("the queue is empty")
        return next(iter(self._queues))

    def count(self, key: K) -> int:
        """Return how many items of this key are waiting."""
        return len(self._queues.get(key, ()))

    def take(self, key: K | None = None) -> T:
        """Return the next item in turn or, with `key`, the next item of that key. This ends the key's turn.

        Without `key`, two consecutive items belong to different keys as long as several keys have items.

        Raises:
            LookupError: The queue, or the key's part of it, is empty.
        """
        key = self.next_key() if key is None else key
        queue = self._queues.pop(key)
        item = queue.popleft()
        if queue:
            self._queues[key] = queue
        self._count -= 1
        return item


def quota(slots: int, of_others: int) -> int:
    """Return how many slots one key can hold: half of the slots that other keys do not use, but at least one."""
    return max(1, (slots - of_others) // 2)


class FairSlots:
    """A fixed number of concurrent slots. Each key can hold up to its `quota` of them."""

    def __init__(self, slots_max: int) -> None:
        self._slots_max = slots_max
        self._taken: Counter[Hashable] = Counter()
        self._released = asyncio.Event()

    def has_room(self, key: Hashable) -> bool:
        own, total = self._taken[key], self._taken.total()
        return total < self._slots_max and own < quota(self._slots_max, total - own)

    async def enter(self, key: Hashable) -> None:
        """Take a slot, waiting until one is free for the key. Safe to cancel."""
        while not self.has_room(key):
            await self._released.wait()
        self._taken[key] += 1

    def leave_after(self, work: asyncio.Future[Any], key: Hashable) -> None:
        """Release the key's slot when `work` is done, even if no caller is still waiting for it."""
        work.add_done_callback(lambda ended: self._leave(key, ended))

    def _leave(self, key: Hashable, ended: asyncio.Future[Any]) -> None:
        if not ended.cancelled():
            ended.exception()  # Mark the exception as retrieved, in case no caller awaits it.
        self._taken -= Counter((key,))
        self._released.set()
        self._released = asyncio.Event()
