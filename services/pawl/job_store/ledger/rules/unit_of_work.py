"""The in-memory rows that a group of operations reads and changes.

Operations change the unit one after another. If an operation raises inside `attempt`, all its changes are undone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import CallKey, RunKey, StoreId, UserId, WorkerId
from pawl.errors import Internal
from pawl.job_store.ledger.rules.events import Event
from pawl.job_store.ledger.rules.rows import (
    CallRow,
    ClientKey,
    CommandKey,
    CommandRow,
    ConversationKey,
    ConversationRow,
    MessageRow,
    RequestKey,
    RequestRow,
    RunRow,
    Segment,
    SegmentRow,
)
from pawl.job_store.ledger.rules.slots import Queue, QueueKey
from pawl.job_store.ledger.rules.trimming import ITERATIONS_KEPT, Trim
from pawl.job_store.schedules.rules import ScheduleKey, ScheduleRow
from pawl.job_store.triggers.rules import EventKey, EventRow, LaneKey, LaneRow, TriggerKey, TriggerRow
from pawl.values import Feature

T_co = TypeVar("T_co", covariant=True)
K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


class Ids(Protocol):
    def new(self, prefix: str) -> str:
        """Return a new id of the form `<prefix>_...`."""


# Functions that revert the current operation when called from last to first.
Undo: TypeAlias = list[Callable[[], None]]


class Table(Generic[K, R]):
    """Rows by key. The table tracks which rows are new and which differ from the stored rows."""

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self._stored: dict[K, R] = {}
        self._rows: dict[K, R] = {}

    def load(self, key: K, row: R) -> None:
        self._stored[key] = row
        self._rows[key] = row

    def get(self, key: K) -> R | None:
        return self._rows.get(key)

    def put(self, key: K, row: R) -> None:
        rows = self._rows
        if key in rows:
            self._undo.append(partial(rows.__setitem__, key, rows[key]))
        else:
            self._undo.append(partial(rows.__delitem__, key))
        rows[key] = row

    def items(self) -> Iterable[tuple[K, R]]:
        return self._rows.items()

    def has_changed(self, key: K) -> bool:
        return self._rows[key] is not self._stored.get(key)

    def created(self) -> list[R]:
        return [row for key, row in self._rows.items() if key not in self._stored]

    def changed(self) -> list[tuple[R, R]]:
        stored = self._stored
        return [(stored[key], row) for key, row in self._rows.items() if key in stored and stored[key] is not row]


class Entries(Generic[R]):
    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self.rows: list[R] = []

    def add(self, rows: Iterable[R]) -> None:
        length = len(self.rows)
        self.rows.extend(rows)
        self._undo.append(partial(self.rows.__delitem__, slice(length, None)))


class Wakeup(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    run: RunKey


class UsageChange(msgspec.Struct, frozen=True, kw_only=True):
    """The encoded usage of a run before and after a model's calls."""

    run: RunRow
    model: str
    before: bytes
    after: bytes


# A store, and the segments that hold a fork's messages.
Path: TypeAlias = tuple[StoreId, tuple[Segment, ...]]


class RowKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the rows that an operation needs.

    The rows are loaded and locked before the operation is applied.

    Related rows are loaded too:

    - A run's open calls, unread commands and conversation are loaded only if it is in `calls_of`, `commands_of` and
      `conversations_of`, respectively.
    - Loading a conversation also loads its active run, the call that the active run executes, the first queued runs,
      the jobs that have notices for it, and its open delegated jobs with the runs that they report to.
    - For a run in `conversations_of` or `ends`, the conversation to which it or its jobs report is also loaded.
    - Loading a request also loads the conversation that it created, if any.
    - `ends` lists runs that may end or start a job. Their conversation, the next queued run, the call that they
      execute, and all runs above them are also loaded.
    - `queues` are queues in which a run may be created, each with its number of slots and the maximum number of waiting
      runs.
    - `stopped` adds all queued runs of conversations that are also in `conversations`, if they belong to the given
      user.
    - `keyed` lists conversations by their clients' keys.
    - Loading a trigger also loads the last run that it started. Loading a lane also loads its last event's run and its
      waiting event.
    - `paths` adds the message counts for forks, whose source conversations must be listed.
    - `step` is a run whose owner commits a step that needs only the run, its conversation and its calls.

    If `owner` is set and does not own all `runs`, nothing is loaded or locked, unless the first of `calls` names this
    user as the one to ask.
    """

    requests: tuple[RequestKey, ...] = ()
    conversations: tuple[ConversationKey, ...] = ()
    stopped: tuple[tuple[ConversationKey, UserId], ...] = ()
    keyed: tuple[ClientKey, ...] = ()
    runs: tuple[RunKey, ...] = ()
    conversations_of: tuple[RunKey, ...] = ()
    ends: tuple[RunKey, ...] = ()
    calls_of: tuple[RunKey, ...] = ()
    calls: tuple[CallKey, ...] = ()
    commands_of: tuple[RunKey, ...] = ()
    commands: tuple[CommandKey, ...] = ()
    queues: tuple[tuple[QueueKey, int, int], ...] = ()
    schedules: tuple[ScheduleKey, ...] = ()
    triggers: tuple[TriggerKey, ...] = ()
    trigger_events: tuple[EventKey, ...] = ()
    lanes: tuple[LaneKey, ...] = ()
    paths: tuple[Path, ...] = ()
    step: RunKey | None = None
    owner: UserId = UserId("")


class UnitOfWork:
    """All rows that a group of operations needs, and the changes that the operations made.

    `now` is the time of the transaction, and `ids` creates ids. `loop_states` maps runs to their new worker states.
    `wakeups` lists the workers to notify of a command. `off_log` contains life-cycle events that belong to no run's
    log. `trims` lists job rows to remove so that `iterations_kept` iterations remain. `work_ready` means that a run
    became claimable. `queues` contains the queues that were loaded. For each path, `kept` contains the last message
    number that the newest summary covers, and the count of messages after it. `off` returns the features that are
    disabled in a store.
    """

    now: datetime

    def __init__(self, ids: Ids) -> None:
        undo: Undo = []
        self.ids = ids
        self.requests: Table[RequestKey, RequestRow] = Table(undo)
        self.conversations: Table[ConversationKey, ConversationRow] = Table(undo)
        self.runs: Table[RunKey, RunRow] = Table(undo)
        self.calls: Table[CallKey, CallRow] = Table(undo)
        self.commands: Table[CommandKey, CommandRow] = Table(undo)
        self.loop_states: Table[RunKey, bytes] = Table(undo)
        self.queues: Table[QueueKey, Queue] = Table(undo)
        self.schedules: Table[ScheduleKey, ScheduleRow] = Table(undo)
        self.triggers: Table[TriggerKey, TriggerRow] = Table(undo)
        self.trigger_events: Table[EventKey, EventRow] = Table(undo)
        self.lanes: Table[LaneKey, LaneRow] = Table(undo)
        self.messages: Entries[MessageRow] = Entries(undo)
        self.segments: Entries[SegmentRow] = Entries(undo)
        self.events: Entries[Event] = Entries(undo)
        self.off_log: Entries[Event] = Entries(undo)
        self.wakeups: Entries[Wakeup] = Entries(undo)
        self.trims: Entries[Trim] = Entries(undo)
        self.usage: Entries[UsageChange] = Entries(undo)
        self.iterations_kept = ITERATIONS_KEPT
        self.kept: dict[Path, tuple[int, int]] = {}
        self.work_ready = False
        self.off: Callable[[StoreId], Collection[Feature]] = lambda _: ()
        self._undo = undo
        self._calls_of: dict[RunKey, dict[CallKey, None]] = {}
        self._commands_of: dict[RunKey, dict[CommandKey, None]] = {}

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Apply one operation atomically. An exception undoes all its changes."""
        self._undo.clear()
        with self.savepoint():
            yield

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Apply part of an operation atomically. An exception undoes the changes that this part has made."""
        length, work_ready = len(self._undo), self.work_ready
        try:
            yield
        except BaseException:
            while len(self._undo) > length:
                self._undo.pop()()
            self.work_ready = work_ready
            raise

    def load_call(self, call: CallRow) -> None:
        self.calls.load(call.key, call)
        self._calls_of.setdefault(RunKey(call.store_id, call.run_id), {})[call.key] = None

    def load_command(self, command: CommandRow) -> None:
        self.commands.load(command.key, command)
        self._commands_of.setdefault(RunKey(command.store_id, command.run_id), {})[command.key] = None

    def put_call(self, call: CallRow) -> None:
        self.calls.put(call.key, call)
        self._touch(RunKey(call.store_id, call.run_id), self._calls_of, call.key)

    def put_command(self, command: CommandRow) -> None:
        self.commands.put(command.key, command)
        self._touch(RunKey(command.store_id, command.run_id), self._commands_of, command.key)

    def _touch(self, run_key: RunKey, rows_of: dict[RunKey, dict[K, None]], key: K) -> None:
        """Write the run even if it has not changed. Its new version shows that its calls or commands have changed."""
        rows_of.setdefault(run_key, {})[key] = None
        run = self.runs.get(run_key)
        if run is None:
            raise Internal("the run of a changed call or command is not loaded")
        if not self.runs.has_changed(run_key):
            self.runs.put(run_key, replace(run))

    def put_run(self, run: RunRow) -> RunRow:
        """Create or change a run, and update the counts of its queue."""
        before = self.runs.get(run.key)
        queued = run.needs_slot(self.now) - (before is not None and before.needs_slot(self.now))
        active = run.is_active - (before is not None and before.is_active)
        queue_key = QueueKey(run.store_id, run.in_background)
        queue = self.queues.get(queue_key)
        if queue is not None and (queued or active):
            self.queues.put(queue_key, replace(queue, queued=queue.queued + queued, active=queue.active + active))
        self.runs.put(run.key, run)
        return run

    def put_conversation(self, conversation: ConversationRow) -> ConversationRow:
        self.conversations.put(conversation.key, conversation)
        return conversation

    def conversation_with(self, key: ClientKey) -> ConversationRow | None:
        return next((row for _, row in self.conversations.items() if row.client_key == key), None)

    def conversation_of(self, run: RunRow) -> ConversationRow:
        conversation = self.conversations.get(ConversationKey(run.store_id, run.conversation_id))
        if conversation is None:
            raise Internal("the run's conversation is not loaded")
        return conversation

    def open_calls(self, run: RunRow) -> list[CallRow]:
        """Return a run's calls that are not settled, in order."""
        calls = map(self.calls.get, self._calls_of.get(run.key, ()))
        is_open = [call for call in calls if call is not None and not call.state.is_terminal]
        return sorted(is_open, key=lambda call: (call.round, call.index))

    def inbox(self, run: RunRow) -> list[CommandRow]:
        """Return the unconsumed commands of a run, in order of arrival."""
        commands = map(self.commands.get, self._commands_of.get(run.key, ()))
        unread = [command for command in commands if command is not None and not command.consumed]
        return sorted(unread, key=lambda command: command.number)


class Operation(Protocol[T_co]):
    """One change to the ledger. It is pure: it reads and changes only the rows whose keys it lists."""

    @property
    def row_keys(self) -> RowKeys: ...

    def apply(self, unit: UnitOfWork) -> T_co:
        """Change the unit and return the result. If this raises PawlError, the caller undoes the changes."""
