"""Group commit: operations that arrive together share one transaction.

While one group is being written, the next one fills up. If operations arrive concurrently, a writer also waits briefly
for more, but foreground operations wait only for other foreground operations. Under load, a second group is written in
parallel, so that a slow disk does not block everyone. Under light load, there is no second group, because small groups
cost nearly as much as large ones. Rows are locked in the database, so any number of replicas can do this concurrently.

Operations that users wait for are written before the runs' own work, but each group has room for both. Within a lane,
stores take turns, so that a busy store delays only itself.

In a database that is sharded by store, a transaction over several stores would be distributed and slow. There, each
group contains operations of a single store. A hash assigns the stores to several queues, each with its own writer.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
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
        self._turn = Lane.WORK

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def waiting(self, lane: Lane) -> int:
        return len(self._lines[lane])

    def put(self, lane: Lane, store_id: StoreId, operation: T) -> None:
        self._lines[lane].put(store_id, operation)

    def next_group(
        self, size: Callable[[T], int], *, operations_max: int, bytes_max: int, one_store: bool = False
    ) -> list[T]:
        """Remove and return the next group, from one store or from several.

        If both lanes have operations, each lane gets a reserved part of each limit.

        The last operation may exceed `bytes_max`. Operations of size 0, whose callers were cancelled, are dropped.
        """
        group: list[T] = []
        people, work = self._lines[Lane.PEOPLE], self._lines[Lane.WORK]
        store = self._next_store() if one_store else None
        if not _count(people, store):
            return _take(work, store, group, size, operations_max=operations_max, bytes_max=bytes_max)
        kept = min(WORK_MAX, _count(work, store))
        most = bytes_max * 3 // 4 if kept else bytes_max
        _take(people, store, group, size, operations_max=operations_max - kept, bytes_max=most)
        most = min(operations_max, len(group) + kept)
        return _take(work, store, group, size, operations_max=most, bytes_max=bytes_max)

    def _next_store(self) -> StoreId:
        """Return the store of the next group. The two lanes take turns."""
        self._turn = Lane.WORK if self._turn is Lane.PEOPLE else Lane.PEOPLE
        return (self._lines[self._turn] or next(line for line in self._lines.values() if line)).next_key()


def _count(line: FairQueue[StoreId, T], store: StoreId | None) -> int:
    return len(line) if store is None else line.count(store)


def _take(
    line: FairQueue[StoreId, T],
    store: StoreId | None,
    group: list[T],
    size: Callable[[T], int],
    *,
    operations_max: int,
    bytes_max: int,
) -> list[T]:
    bytes_taken = sum(map(size, group))
    while _count(line, store) and len(group) < operations_max and bytes_taken < bytes_max:
        operation = line.take(store)
        if operation_bytes := size(operation):
            group.append(operation)
            bytes_taken += operation_bytes
    return group


# Maximum number of operations in one group.
OPERATIONS_MAX: Final = 128

# A group of this size accepts no more operations.
GROUP_BYTES_MAX: Final = 8 * 1024 * 1024

# Maximum number of waiting operations; more are refused with OVERLOADED.
WAITING_MAX: Final = 10_000

# For each writer: the number of waiting operations, and of those that users are waiting for, at which it starts to
# write. A second writer helps only under load.
_GROUP_MIN: Final = ((1, 1), (32, 8))
# Number of queues, each with one writer, if a group may contain operations of only one store.
STORE_QUEUES: Final = 8
_ATTEMPTS_MAX: Final = 8
# A group costs nearly the same whatever its size. So if operations arrive concurrently, a writer waits briefly for more
# of them; if they arrive one by one, it does not.
_GATHER_SECONDS: Final = 0.004
_SIDE_BY_SIDE: Final = 1.5

_log = logs.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    operation: Operation[Any]
    size_bytes: int
    answer: asyncio.Future[Any]


class _Queue:
    def __init__(self) -> None:
        self.waiting = Lanes[_Waiting]()
        self.arrived = asyncio.Event()
        # Waiting operations that are not in the background.
        self.foreground: set[_Waiting] = set()
        self._foreground_arrived = asyncio.Event()
        self._usual_size = 1.0
        self._usual_foreground = 1.0

    def put(self, lane: Lane, store_id: StoreId, waiting: _Waiting, *, in_background: bool) -> None:
        if not in_background:
            self.foreground.add(waiting)
            self._foreground_arrived.set()
        self.waiting.put(lane, store_id, waiting)
        self.arrived.set()

    async def gather(self) -> None:
        """Wait briefly for more operations, if they usually arrive concurrently.

        Foreground operations wait only for other foreground operations, not for those of background runs.
        """
        if not self.foreground and self._gathers():
            self._foreground_arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_SECONDS):
                    await self._foreground_arrived.wait()
        if self.foreground and self._gathers():
            await asyncio.sleep(_GATHER_SECONDS)

    def _gathers(self) -> bool:
        if self.foreground:
            waiting, usual = len(self.foreground), self._usual_foreground
        else:
            waiting, usual = len(self.waiting), self._usual_size
        return waiting < usual and usual > _SIDE_BY_SIDE

    def note(self, group: Collection[_Waiting]) -> None:
        """Record the size of a group that is no longer waiting."""
        foreground = self.foreground.intersection(group)
        self.foreground -= foreground
        self._usual_size += (len(group) - self._usual_size) / 4 if group else 0
        self._usual_foreground += (len(foreground) - self._usual_foreground) / 4 if foreground else 0


class GroupCommit:
    """Runs operations from many tasks. It is an async context manager that finishes accepted operations on exit.

    `lifecycle_written` is called after a group has written events for the outbox relay. If `one_store` is set, each
    group contains operations of a single store.
    """

    def __init__(
        self,
        journal: Journal,
        announcer: Announcer,
        meter: PrometheusMeter,
        *,
        monotonic: Callable[[], float],
        lifecycle_written: Callable[[], None],
        one_store: bool = False,
    ) -> None:
        self._journal = journal
        self._announcer = announcer
        self._meter = meter
        self._monotonic = monotonic
        self._lifecycle_written = lifecycle_written
        self._one_store = one_store
        self._queues = [_Queue() for _ in range(STORE_QUEUES if one_store else 1)]
        self._writers: list[asyncio.Task[None]] = []
        self._closing = False

    async def __aenter__(self) -> Self:
        self._writers = [
            asyncio.create_task(self._write_groups(queue, operations_min, people_min), name="group_commit")
            for queue in self._queues
            for operations_min, people_min in _GROUP_MIN[: 1 if self._one_store else None]
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        for queue in self._queues:
            queue.arrived.set()
        await asyncio.gather(*self._writers)

    async def run(
        self,
        operation: Operation[T],
        *,
        size_bytes: int,
        store_id: StoreId,
        lane: Lane = Lane.WORK,
        in_background: bool = False,
    ) -> T:
        """Return the result of an operation on rows of this store, once it is durable.

        Set `in_background` if no user is waiting for the operation.

        Cancelling the caller does not undo an accepted operation.

        Raises:
            PawlError: The operation was refused and had no effect.
            Overloaded, ShuttingDown: The operation was not accepted.
            DependencyUnavailable: The database is unavailable. The operation may have been applied, and is safe to
                repeat with the same id.
        """
        if self._closing:
            raise ShuttingDown
        if sum(len(queue.waiting) for queue in self._queues) >= WAITING_MAX:
            raise Overloaded
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        queue = self._queues[zlib.crc32(store_id.encode()) % len(self._queues)]
        waiting = _Waiting(operation, size_bytes, answer)
        queue.put(lane, store_id, waiting, in_background=in_background)
        try:
            return await answer
        finally:
            queue.foreground.discard(waiting)

    async def _write_groups(self, queue: _Queue, operations_min: int, people_min: int) -> None:
        waiting = queue.waiting
        while True:
            if len(waiting) >= operations_min or waiting.waiting(Lane.PEOPLE) >= people_min:
                if not self._closing:
                    await queue.gather()
                group = waiting.next_group(
                    _weight, operations_max=OPERATIONS_MAX, bytes_max=GROUP_BYTES_MAX, one_store=self._one_store
                )
                queue.note(group)
                await self._write_and_answer(group)
            elif self._closing:
                return
            else:
                queue.arrived.clear()
                await queue.arrived.wait()

    async def _write_and_answer(self, group: Sequence[_Waiting]) -> None:
        """Write a group and answer all its callers, even after errors, so that no caller waits forever."""
        try:
            await self._write(group)
        except Exception as error:  # noqa: BLE001  # see above
            _log.exception("ledger.group_failed")
            for waiting in group:
                _answer(waiting, error)

    async def _write(self, group: Sequence[_Waiting]) -> None:
        if not group:
            return
        start = self._monotonic()
        try:
            group = await self._write_steps(group)
            if not group:
                return
            written = await self._write_with_retries([waiting.operation for waiting in group])
        except (PawlError, GroupConflict) as error:
            failure = (
                error
                if isinstance(error, PawlError)
                else DependencyUnavailable("the database is too busy: try again later")
            )
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
        """Write and answer as many of a group's steps as possible with one statement.

        Return the remaining operations.
        """
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
    return 0 if waiting.answer.done() else max(1, waiting.size_bytes)


def _answer(waiting: _Waiting, outcome: object) -> None:
    if waiting.answer.done():
        return  # The caller was cancelled.
    if isinstance(outcome, Exception):
        waiting.answer.set_exception(outcome)
    else:
        waiting.answer.set_result(outcome)
