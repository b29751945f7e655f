"""Splits items into parts of bounded size, for messages and transactions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def in_parts(
    items: Iterable[T], size: Callable[[T], int], *, size_max: int, items_max: int = sys.maxsize
) -> Iterator[list[T]]:
    """Yield the items in order, in parts of at most `items_max` items and a total size of `size_max`.

    An item over `size_max` forms its own part.
    """
    part: list[T] = []
    total = 0
    for item in items:
        more = size(item)
        if part and (total + more > size_max or len(part) >= items_max):
            yield part
            part, total = [], 0
        part.append(item)
        total += more
    if part:
        yield part
