"""Group commit: operations that arrive together share one transaction.

While a group is being written, the next one gathers, and a moment longer where
operations come side by side. When many wait, or several people, a second
group is written at the same time, so that a slow disk does not hold everybody up;
small groups are not, because they cost nearly as much as large ones. `lanes` says
which operations come first. Rows lock each other out in the database, so any number
of replicas may do this side by side.

The order in which operations are written: what people wait for, then the work of runs.

Within a lane the stores take turns, so that one that brings very much delays its own. Neither lane waits for the
other's end: each group has room for both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Generic, Self, TypeVar

from pawl.chassis.ids import StoreId
from pawl.chassis.process import logs
from pawl.chassis.rpc.fairness import FairQueue
from pawl.errors import DependencyUnavailable, Overloaded, PawlError, ShuttingDown
from pawl.job_store.ledger.metrics import PrometheusMeter
from pawl.job_store.ledger.ports import Announcer, GroupConflict, Journal, Operation, Written

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
        self._lines: dict[Lane, FairQueue[StoreId, T]] = {lane: FairQueue() for lane in Lane}

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
    line: FairQueue[StoreId, T], group: list[T], size: Callable[[T], int], operations_max: int, bytes_max: int
) -> list[T]:
    bytes_taken = sum(map(size, group))
    while line and len(group) < operations_max and bytes_taken < bytes_max:
        operation = line.take()
        if operation_bytes := size(operation):
            group.append(operation)
            bytes_taken += operation_bytes
    return group


OPERATIONS_MAX: Final = 128
"""Most operations of one group."""

GROUP_BYTES_MAX: Final = 8 * 1024 * 1024
"""A group that has reached this size takes no more operations."""

WAITING_MAX: Final = 10_000
"""Operations that may wait; more are refused with OVERLOADED."""

# How many operations must wait for each writer to take them, or how many people: the second one helps only under load.
_GROUP_MIN: Final = ((1, 1), (32, 8))
_ATTEMPTS_MAX: Final = 8
# A group costs nearly the same whatever its size. So where operations come side by side, a writer waits a moment for
# more of them; where they come one after the other, it does not.
_GATHER_SECONDS: Final = 0.004
_SIDE_BY_SIDE: Final = 1.5

_NO_STORE: Final = StoreId("")

_log = logs.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    operation: Operation[Any]
    size_bytes: int
    answer: asyncio.Future[Any]


class GroupCommit:
    """Takes operations from many tasks; an async context manager that drains at its end.

    `lifecycle_written` is called when a group left events for the outbox relay.
    """

    def __init__(
        self,
        journal: Journal,
        announcer: Announcer,
        meter: PrometheusMeter,
        *,
        monotonic: Callable[[], float],
        lifecycle_written: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._announcer = announcer
        self._meter = meter
        self._monotonic = monotonic
        self._lifecycle_written = lifecycle_written
        self._waiting = Lanes[_Waiting]()
        self._arrived = asyncio.Event()
        self._writers: list[asyncio.Task[None]] = []
        self._closing = False
        self._usual_size = 1.0

    async def __aenter__(self) -> Self:
        self._writers = [
            asyncio.create_task(self._write_groups(operations_min, people_min), name="group_commit")
            for operations_min, people_min in _GROUP_MIN
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        self._arrived.set()
        await asyncio.gather(*self._writers)

    async def run(
        self,
        operation: Operation[T],
        *,
        size_bytes: int,
        lane: Lane = Lane.WORK,
        store_id: StoreId = _NO_STORE,
    ) -> T:
        """Return the operation's answer once it is durable. What is of no store takes turns with the stores.

        Cancelling the caller does not undo an operation that was taken.

        Raises:
            PawlError: the operation was refused and changed nothing.
            Overloaded, ShuttingDown: it was not taken.
            DependencyUnavailable: the database is away; the operation may have
                been carried out, and is safe to repeat by its id.
        """
        if self._closing:
            raise ShuttingDown
        if len(self._waiting) >= WAITING_MAX:
            raise Overloaded
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.put(lane, store_id, _Waiting(operation, size_bytes, answer))
        self._arrived.set()
        return await answer

    async def _write_groups(self, operations_min: int, people_min: int) -> None:
        waiting = self._waiting
        while True:
            if len(waiting) >= operations_min or waiting.waiting(Lane.PEOPLE) >= people_min:
                if len(waiting) < self._usual_size and self._usual_size > _SIDE_BY_SIDE and not self._closing:
                    await asyncio.sleep(_GATHER_SECONDS)
                group = waiting.next_group(_weight, operations_max=OPERATIONS_MAX, bytes_max=GROUP_BYTES_MAX)
                await self._write_for_sure(group)
            elif self._closing:
                return
            else:
                self._arrived.clear()
                await self._arrived.wait()

    async def _write_for_sure(self, group: Sequence[_Waiting]) -> None:
        """Write a group and answer all of it, whatever happens: who comes after a writer has ended waits for ever."""
        try:
            await self._write(group)
        except Exception as error:  # noqa: BLE001  # see above
            _log.exception("ledger.group_failed")
            for waiting in group:
                _answer(waiting, error)

    async def _write(self, group: Sequence[_Waiting]) -> None:
        if not group:
            return
        self._usual_size += (len(group) - self._usual_size) / 4
        began = self._monotonic()
        try:
            written = await self._write_once_more([waiting.operation for waiting in group])
        except (PawlError, GroupConflict) as error:
            failure = error if isinstance(error, PawlError) else DependencyUnavailable("the database is too busy")
            for waiting in group:
                _answer(waiting, failure)
        except Exception as error:  # noqa: BLE001  # one bad operation must not fail the others
            if len(group) == 1:
                _answer(group[0], error)
                return
            for waiting in group:
                await self._write([waiting])
        else:
            self._meter.group_written(operations=len(group), seconds=self._monotonic() - began)
            for waiting, outcome in zip(group, written.outcomes, strict=True):
                if isinstance(outcome, PawlError):
                    self._meter.refused(outcome)
                _answer(waiting, outcome)
            await self._announce(written)

    async def _write_once_more(self, operations: Sequence[Operation[Any]]) -> Written:
        """Write a group, again if another transaction came between."""
        for _ in range(_ATTEMPTS_MAX - 1):
            try:
                return await self._journal.write(operations)
            except GroupConflict:
                continue
        return await self._journal.write(operations)

    async def _announce(self, written: Written) -> None:
        """Tell others. The record is safe already, so nothing that goes wrong here may stop a writer."""
        try:
            if written.lifecycle_count:
                self._lifecycle_written()
            if written.events:
                await self._announcer.publish(written.events)
            if written.wakeups:
                await self._announcer.wake(written.wakeups)
            if written.work_ready:
                await self._announcer.work_ready()
            if written.inboxes:
                await self._announcer.inboxes_changed(written.inboxes)
        except Exception:  # noqa: BLE001  # see above
            _log.exception("ledger.announcement_failed")


def _weight(waiting: _Waiting) -> int:
    """Return the part of an operation in the bytes of a group; nothing if its caller has gone."""
    return 0 if waiting.answer.done() else max(1, waiting.size_bytes)


def _answer(waiting: _Waiting, outcome: object) -> None:
    if waiting.answer.done():
        return  # The caller has gone.
    if isinstance(outcome, Exception):
        waiting.answer.set_exception(outcome)
    else:
        waiting.answer.set_result(outcome)
