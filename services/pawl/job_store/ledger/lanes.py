"""The order in which operations are written: what people wait for, then the work of runs.

Within a lane the stores take turns, so that one that brings very much delays its own. Neither lane waits for the
other's end: each group has room for both.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Final, Generic, TypeVar

from pawl.chassis.ids import StoreId
from pawl.chassis.rpc.shares import Shares

T = TypeVar("T")

WORK_MAX: Final = 32
"""Most operations of the work lane in a group that people wait for, and what is kept free for it in each."""


class Lane(Enum):
    """The kind of an operation, by who waits for it."""

    PEOPLE = auto()
    """A person, or a program that acts for one: a message, a command, a call that a front end takes."""
    WORK = auto()
    """A worker with a run, or nobody: the steps of runs, and what the job store does by itself."""


class Lanes(Generic[T]):
    """Operations that wait to be written, by lane and store."""

    def __init__(self) -> None:
        self._lines: dict[Lane, Shares[StoreId, T]] = {lane: Shares() for lane in Lane}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def waiting(self, lane: Lane) -> int:
        """Return how many wait in one lane."""
        return len(self._lines[lane])

    def put(self, lane: Lane, store_id: StoreId, operation: T) -> None:
        """Let an operation wait."""
        self._lines[lane].put(store_id, operation)

    def next_group(self, size: Callable[[T], int], *, operations_max: int, bytes_max: int) -> list[T]:
        """Take what is to be written next: of either lane, where both wait, within its part of both bounds.

        The bounds are reached by the last operation, whatever its size. One of size 0 is of no use any more, and counts
        for nothing.
        """
        group: list[T] = []
        people, work = self._lines[Lane.PEOPLE], self._lines[Lane.WORK]
        if not people:
            return _take(work, group, size, operations_max, bytes_max)
        kept = min(WORK_MAX, len(work))
        _take(people, group, size, operations_max - kept, bytes_max * 3 // 4 if kept else bytes_max)
        return _take(work, group, size, min(operations_max, len(group) + kept), bytes_max)


def _take(
    line: Shares[StoreId, T], group: list[T], size: Callable[[T], int], operations_max: int, bytes_max: int
) -> list[T]:
    bytes_taken = sum(map(size, group))
    while line and len(group) < operations_max and bytes_taken < bytes_max:
        operation = line.take()
        if operation_bytes := size(operation):
            group.append(operation)
            bytes_taken += operation_bytes
    return group
