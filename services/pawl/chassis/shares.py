"""A line in which each key has its share: the keys take turns, and the items of one key come in their order."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class Shares(Generic[K, T]):
    """Items that wait, by key. Whoever brings many delays their own: another key's first is next but for one a key."""

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
