"""The rows that a group of operations works on, in memory.

Operations change the unit one after the other. One that is refused leaves it as
it was: every change made inside `attempt` is undone when an exception passes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
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
    Queue,
    QueueKey,
    RequestKey,
    RequestRow,
    RunRow,
    Segment,
    SegmentRow,
)
from pawl.job_store.ledger.rules.trimming import ITERATIONS_KEPT, Trim
from pawl.job_store.schedules.rules import ScheduleKey, ScheduleRow
from pawl.job_store.triggers.rules import EventKey, EventRow, LaneKey, LaneRow, TriggerKey, TriggerRow

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


class Ids(Protocol):
    """The source of new ids."""

    def new(self, prefix: str) -> str:
        """Return a fresh id that starts with `prefix` and an underscore."""


Undo: TypeAlias = list[Callable[[], None]]
"""The way back to the state before the operation that is being applied: the newest change is the last."""


class Table(Generic[K, R]):
    """Rows by key. Knows which of them are new and which differ from what was loaded."""

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self._stored: dict[K, R] = {}
        self._rows: dict[K, R] = {}

    def load(self, key: K, row: R) -> None:
        """Take a row as it is stored."""
        self._stored[key] = row
        self._rows[key] = row

    def get(self, key: K) -> R | None:
        """Return the row as it is now."""
        return self._rows.get(key)

    def put(self, key: K, row: R) -> None:
        """Create or change a row."""
        rows = self._rows
        if key in rows:
            self._undo.append(partial(rows.__setitem__, key, rows[key]))
        else:
            self._undo.append(partial(rows.__delitem__, key))
        rows[key] = row

    def items(self) -> Iterable[tuple[K, R]]:
        """Return all keys and rows as they are now."""
        return self._rows.items()

    def created(self) -> list[R]:
        """Return the rows that are not stored yet."""
        return [row for key, row in self._rows.items() if key not in self._stored]

    def changed(self) -> list[tuple[R, R]]:
        """Return the rows that are stored otherwise: each as stored, and as it is now."""
        stored = self._stored
        return [(stored[key], row) for key, row in self._rows.items() if key in stored and stored[key] is not row]


class Entries(Generic[R]):
    """Rows that are only ever added."""

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self.rows: list[R] = []

    def add(self, rows: Iterable[R]) -> None:
        """Append rows, in order."""
        length = len(self.rows)
        self.rows.extend(rows)
        self._undo.append(partial(self.rows.__delitem__, slice(length, None)))


class Wakeup(msgspec.Struct, frozen=True, kw_only=True):
    """A command came for a run that a worker holds."""

    worker_id: WorkerId
    run: RunKey


Path: TypeAlias = tuple[StoreId, tuple[Segment, ...]]
"""The path through conversations of a store on which the messages of a fork stand."""


class RowKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that an operation names, to be loaded and locked before it is applied.

    With a run come its open calls, its unread commands or its conversation only
    where `calls_of`, `commands_of` or `conversations_of` name it too. With a
    conversation come its active run and the first of those that wait for their
    turn, and if jobs tell it something, those; with a request that made a
    conversation comes that one. `ends` names runs that may end: with them come their
    conversation, the run whose turn is next, and the call that they do, with its run;
    the latter also with the active run of a conversation. `queues` are those in which
    a run may be created, each with the most runs that may wait there for a place, and how many places it has.
    All runs that wait in the conversations of `stopped`, which `conversations` names too, come with them, to be
    stopped, if those are that user's. `keyed` names conversations by the keys of clients: those that
    are there come as if they were named themselves. `schedules` come alone. With `triggers` comes the run of their last
    fire, with `lanes` that of their last event, which may be stopped, and the event that waits. Of `paths`, which lead
    through conversations that are named, it is counted what is there. With `owner` none of this comes, and nothing is
    locked, if `runs` are not that user's.
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
    owner: UserId = UserId("")


class UnitOfWork:
    """All rows that a group of operations names, and what the operations made of them.

    `now` is the time of their transaction, `ids` gives them new ids.
    `loop_states` are new states of workers by run, `wakeups` the workers to be told
    of a command, `off_log` what the life cycle alone tells, `trims` what is removed of jobs, of which `iterations_kept`
    stay, `work_ready` says that a run became claimable. `queues` has those that were loaded. `kept` says of
    each path up to which number the newest summary on it stands for it, and how many messages follow that.
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
        self.iterations_kept = ITERATIONS_KEPT
        self.kept: dict[Path, tuple[int, int]] = {}
        self.work_ready = False
        self._undo = undo
        self._calls_of: dict[RunKey, dict[CallKey, None]] = {}
        self._commands_of: dict[RunKey, dict[CommandKey, None]] = {}

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Apply one operation: all of it, or nothing if an exception passes."""
        self._undo.clear()
        with self.savepoint():
            yield

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Apply a part of an operation: all of it, or nothing if an exception passes."""
        length, work_ready = len(self._undo), self.work_ready
        try:
            yield
        except BaseException:
            while len(self._undo) > length:
                self._undo.pop()()
            self.work_ready = work_ready
            raise

    def load_call(self, call: CallRow) -> None:
        """Take a call as it is stored."""
        self.calls.load(call.key, call)
        self._calls_of.setdefault(RunKey(call.store_id, call.run_id), {})[call.key] = None

    def load_command(self, command: CommandRow) -> None:
        """Take a command as it is stored."""
        self.commands.load(command.key, command)
        self._commands_of.setdefault(RunKey(command.store_id, command.run_id), {})[command.key] = None

    def put_call(self, call: CallRow) -> None:
        """Create or change a call."""
        self.calls.put(call.key, call)
        self._calls_of.setdefault(RunKey(call.store_id, call.run_id), {})[call.key] = None

    def put_command(self, command: CommandRow) -> None:
        """Create or change a command."""
        self.commands.put(command.key, command)
        self._commands_of.setdefault(RunKey(command.store_id, command.run_id), {})[command.key] = None

    def put_run(self, run: RunRow) -> RunRow:
        """Create or change a run; returns it."""
        before = self.runs.get(run.key)
        queued = run.wants_to_begin(self.now) - (before is not None and before.wants_to_begin(self.now))
        active = run.is_active - (before is not None and before.is_active)
        queue_key = QueueKey(run.store_id, run.in_background)
        queue = self.queues.get(queue_key)
        if queue is not None and (queued or active):
            self.queues.put(queue_key, replace(queue, queued=queue.queued + queued, active=queue.active + active))
        self.runs.put(run.key, run)
        return run

    def put_conversation(self, conversation: ConversationRow) -> ConversationRow:
        """Create or change a conversation; returns it."""
        self.conversations.put(conversation.key, conversation)
        return conversation

    def conversation_with(self, key: ClientKey) -> ConversationRow | None:
        """Return the conversation that has this key."""
        return next((row for _, row in self.conversations.items() if row.client_key == key), None)

    def conversation_of(self, run: RunRow) -> ConversationRow:
        """Return the conversation of a run."""
        conversation = self.conversations.get(ConversationKey(run.store_id, run.conversation_id))
        if conversation is None:
            raise Internal("the conversation of a run is not in the unit")
        return conversation

    def open_calls(self, run: RunRow) -> list[CallRow]:
        """Return the calls of a run that are not settled, in call order."""
        calls = map(self.calls.get, self._calls_of.get(run.key, ()))
        is_open = [call for call in calls if call is not None and not call.state.is_terminal]
        return sorted(is_open, key=lambda call: (call.round, call.index))

    def inbox(self, run: RunRow) -> list[CommandRow]:
        """Return the unconsumed commands of a run, in order of arrival."""
        commands = map(self.commands.get, self._commands_of.get(run.key, ()))
        unread = [command for command in commands if command is not None and not command.consumed]
        return sorted(unread, key=lambda command: command.number)
