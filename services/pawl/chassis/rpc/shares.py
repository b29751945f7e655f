"""Lines and places of which each key (a store) has its share, so that one that is slow or greedy delays its own."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class Shares(Generic[K, T]):
    """Items that wait, by key: the keys take turns, and the items of one key come in their order.

    Whoever brings many delays their own: another key's first is next but for one a key.
    """

    def __init__(self) -> None:
        self._lines: dict[K, deque[T]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, key: K, item: T) -> None:
        """Let an item wait at the end of the line of its key."""
        self._lines.setdefault(key, deque()).append(item)
        self._count += 1

    def take(self) -> T:
        """Return the item whose turn it is; the next one is of another key, if another one waits.

        Raises:
            LookupError: none waits.
        """
        if not self._lines:
            raise LookupError("nothing waits")
        key = next(iter(self._lines))
        line = self._lines.pop(key)
        item = line.popleft()
        if line:
            self._lines[key] = line
        self._count -= 1
        return item


def share(places: int, of_others: int) -> int:
    """Return how many places one key may have: half of what others leave, so none, and no two, shut out the next."""
    return max(1, (places - of_others) // 2)


class Places:
    """Places, so many at once, of which each key may have its `share`."""

    def __init__(self, at_once_max: int) -> None:
        self._at_once_max = at_once_max
        self._taken: Counter[Hashable] = Counter()
        self._one_left = asyncio.Event()

    def has_room(self, key: Hashable) -> bool:
        """Return whether a key may have another place."""
        own, total = self._taken[key], self._taken.total()
        return total < self._at_once_max and own < share(self._at_once_max, total - own)

    async def enter(self, key: Hashable) -> None:
        """Take a place as soon as the key may have one. Safe to cancel."""
        while not self.has_room(key):
            await self._one_left.wait()
        self._taken[key] += 1

    def leave_after(self, work: asyncio.Future[Any], key: Hashable) -> None:
        """Leave a place once that work has ended, also if nobody waits for it any more."""
        work.add_done_callback(lambda ended: self._leave(key, ended))

    def _leave(self, key: Hashable, ended: asyncio.Future[Any]) -> None:
        if not ended.cancelled():
            ended.exception()  # Seen, for perhaps nobody asks.
        self._taken -= Counter((key,))
        self._one_left.set()
        self._one_left = asyncio.Event()
