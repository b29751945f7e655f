"""Implements group commit: operations that arrive together share one transaction.

While one group is being written, the next one gathers. If operations arrive concurrently, a writer also waits briefly
for more. Under load a second group is written in parallel, so that a slow disk does not block everyone. Under light
load it is not, because small groups cost nearly as much as large ones. Rows are locked in the database, so any number
of replicas can do this concurrently.

Operations that users wait for are written before the runs' own work, but each group has room for both. Within a lane,
stores take turns, so that a busy store delays only itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Generic, Self, TypeVar

from pawl.chassis.ids import StoreId
from pawl.chassis.process import logs
from pawl.errors import DependencyUnavailable, Overloaded, PawlError, ShuttingDown
from pawl.job_store.ledger.metrics import PrometheusMeter
from pawl.job_store.ledger.ports import Announcer, GroupConflict, Journal, Written
from pawl.job_store.ledger.rules.unit_of_work import Operation
from pawl.server.rpc.fairness import FairQueue

T = TypeVar("T")

# If users are waiting for operations of a group, it has exactly this much room for work-lane operations.
WORK_MAX: Final = 32


class Lane(Enum):
    # Requests of users, or of programs acting for them: messages, commands, leases on front-end calls.
    PEOPLE = auto()
    # Steps of runs, and the job store's background work.
    WORK = auto()


class Lanes(Generic[T]):
    def __init__(self) -> None:
        self._lines: dict[Lane, FairQueue[StoreId, T]] = {lane: FairQueue() for lane in Lane}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def waiting(self, lane: Lane) -> int:
        return len(self._lines[lane])

    def put(self, lane: Lane, store_id: StoreId, operation: T) -> None:
        self._lines[lane].put(store_id, operation)

    def next_group(self, size: Callable[[T], int], *, operations_max: int, bytes_max: int) -> list[T]:
        """Take the next group.

        If both lanes have operations, part of both limits is reserved for each lane.

        The last operation may exceed `bytes_max`. Operations of size 0, whose callers were cancelled, are dropped.
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


# Maximum number of operations in one group.
OPERATIONS_MAX: Final = 128

# A group of this size takes no more operations.
GROUP_BYTES_MAX: Final = 8 * 1024 * 1024

# Maximum number of waiting operations; more are refused with OVERLOADED.
WAITING_MAX: Final = 10_000

# For each writer: the number of waiting operations, and of those that users are waiting for, at which it starts to
# write. A second writer helps only under load.
_GROUP_MIN: Final = ((1, 1), (32, 8))
_ATTEMPTS_MAX: Final = 8
# A group costs nearly the same whatever its size. So if operations arrive concurrently, a writer waits briefly for more
# of them; if they arrive one by one, it does not.
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
    """Runs operations from many tasks; an async context manager that drains on exit.

    `lifecycle_written` is called after a group has written events for the outbox relay.
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
        """Return the result of an operation once it is durable.

        Operations without a store are queued as if they belonged to one more store. Cancelling the caller does not undo
        an accepted operation.

        Raises:
            PawlError: The operation was refused and had no effect.
            Overloaded, ShuttingDown: The operation was not accepted.
            DependencyUnavailable: The database is unavailable. The operation may have been applied, and is safe to
                repeat with the same id.
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
                await self._write_and_answer(group)
            elif self._closing:
                return
            else:
                self._arrived.clear()
                await self._arrived.wait()

    async def _write_and_answer(self, group: Sequence[_Waiting]) -> None:
        """Write a group and answer all its callers, even after errors: otherwise callers would wait forever."""
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
        start = self._monotonic()
        try:
            group = await self._write_steps(group)
            if not group:
                return
            written = await self._write_with_retries([waiting.operation for waiting in group])
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
            self._measure(written, len(group), start)
            for waiting, outcome in zip(group, written.outcomes, strict=True):
                if isinstance(outcome, PawlError):
                    self._meter.refused(outcome)
                _answer(waiting, outcome)
            await self._announce(written)

    async def _write_steps(self, group: Sequence[_Waiting]) -> Sequence[_Waiting]:
        """Write a group of steps with one statement, if possible, and answer them; return the operations left."""
        start = self._monotonic()
        try:
            written = await self._journal.write_steps([waiting.operation for waiting in group])
        except PawlError:
            raise
        except GroupConflict:
            return group
        except Exception:  # noqa: BLE001  # nothing was written: the transaction finds the operation at fault
            _log.exception("ledger.steps_failed")
            return group
        left = [waiting for waiting, outcome in zip(group, written.outcomes, strict=True) if outcome is None]
        if len(left) == len(group):
            return group
        self._measure(written, len(group) - len(left), start)
        for waiting, outcome in zip(group, written.outcomes, strict=True):
            if outcome is not None:
                _answer(waiting, outcome)
        await self._announce(written)
        return left

    async def _write_with_retries(self, operations: Sequence[Operation[Any]]) -> Written:
        for _ in range(_ATTEMPTS_MAX - 1):
            try:
                return await self._journal.write(operations)
            except GroupConflict:
                continue
        return await self._journal.write(operations)

    def _measure(self, written: Written, operations: int, start: float) -> None:
        self._meter.group_written(operations=operations, seconds=self._monotonic() - start)
        self._meter.batches_written(row.last_seq + 1 - row.first_seq for row in written.events)
        self._meter.work_ended(written.started_runs, written.ended_runs, written.ended_calls)

    async def _announce(self, written: Written) -> None:
        """Publish the changes. They are already durable, so errors here must not stop the writer."""
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
            if written.conversations:
                await self._announcer.conversations_changed(written.conversations)
        except Exception:  # noqa: BLE001  # see above
            _log.exception("ledger.announcement_failed")


def _weight(waiting: _Waiting) -> int:
    """Return the size of an operation within its group; 0 if its caller was cancelled."""
    return 0 if waiting.answer.done() else max(1, waiting.size_bytes)


def _answer(waiting: _Waiting, outcome: object) -> None:
    if waiting.answer.done():
        return  # The caller was cancelled.
    if isinstance(outcome, Exception):
        waiting.answer.set_exception(outcome)
    else:
        waiting.answer.set_result(outcome)
