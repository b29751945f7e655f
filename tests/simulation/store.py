"""The ledger's database in memory, for job-store.

Assumptions about PostgreSQL:

1. Transactions that lock common rows are serial: each group is applied at one instant of virtual time, to the rows as
the previous one left them.
2. A transaction is atomic even if the process dies. An acknowledged transaction is durable.
3. A transaction may be refused as a whole (`GroupConflict`) and retried. After a lost connection the outcome is
unknown.
4. A statement sees one state. Statements of a read without a transaction may see successive states.
5. `clock_timestamp()` is one clock for all processes, and may jump in both directions.
6. A read-only server still answers reads.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from msgspec.structs import replace

from pawl.chassis.ids import CallKey, ConversationId, IdSource, RunKey, StoreId
from pawl.errors import DependencyUnavailable, PawlError
from pawl.job_store.ledger.cache import RunCache
from pawl.job_store.ledger.ports import GroupConflict, LogRow, Written
from pawl.job_store.ledger.reading import Loaded
from pawl.job_store.ledger.rpc import log_rows
from pawl.job_store.ledger.rpc.events import encode_event
from pawl.job_store.ledger.rpc.messages import own_usage
from pawl.job_store.ledger.rules import steps
from pawl.job_store.ledger.rules.commit import Commit
from pawl.job_store.ledger.rules.events import Event
from pawl.job_store.ledger.rules.log import changed_conversations
from pawl.job_store.ledger.rules.prefix import HistoryPrefix, PrefixCounts, is_valid
from pawl.job_store.ledger.rules.rows import (
    CallRow,
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
from pawl.job_store.ledger.rules.trimming import Trim
from pawl.job_store.ledger.rules.unit_of_work import Ids, Operation, RowKeys, UnitOfWork
from pawl.job_store.ledger.rules.usage import UsageKey, Used, added
from pawl.job_store.schedules.rules import ScheduleKey, ScheduleRow
from pawl.values import CallState
from tests.simulation import rules_of_jobs
from tests.simulation.chance import Chance
from tests.simulation.history import History
from tests.simulation.starters import TriggerTables

P = ParamSpec("P")
T = TypeVar("T")

# Iterations kept of a job; small, so that jobs are trimmed.
ITERATIONS_KEPT = 2
_TRANSACTION_SECONDS = 0.003
_SLOW_ANSWERS = 0.3
_FAILURE_RATE = 0.004


@dataclass
class DatabaseServer:
    ahead_seconds: float = 0.0
    read_only: bool = False
    refusal: type[PawlError] = DependencyUnavailable


@dataclass(frozen=True, slots=True)
class ScheduleChange:
    """A schedule before and after a change or firing, and whether the run of its last firing was open then.

    `latest` is the latest time at which it was claimed.
    """

    before: ScheduleRow | None
    after: ScheduleRow
    now: datetime
    latest: datetime | None = None
    is_fire: bool = False
    is_busy: bool = False


@dataclass
class Tables:
    """All rows, which only transactions change. `written_at` uses a clock that does not jump."""

    requests: dict[RequestKey, RequestRow] = field(default_factory=dict)
    conversations: dict[ConversationKey, ConversationRow] = field(default_factory=dict)
    runs: dict[RunKey, RunRow] = field(default_factory=dict)
    calls: dict[CallKey, CallRow] = field(default_factory=dict)
    commands: dict[CommandKey, CommandRow] = field(default_factory=dict)
    loop_states: dict[RunKey, bytes] = field(default_factory=dict)
    schedules: dict[ScheduleKey, ScheduleRow] = field(default_factory=dict)
    starters: TriggerTables = field(default_factory=TriggerTables, compare=False)
    schedule_changes: list[ScheduleChange] = field(default_factory=list, compare=False)
    schedule_claims: dict[ScheduleKey, datetime] = field(default_factory=dict, compare=False)
    # Messages written in each conversation.
    messages: dict[ConversationKey, list[MessageRow]] = field(default_factory=dict)
    segments: dict[ConversationKey, list[SegmentRow]] = field(default_factory=dict)
    events: dict[RunKey, list[bytes]] = field(default_factory=dict)
    # The last seq removed; the events stay here for the checkers.
    trimmed: dict[RunKey, int] = field(default_factory=dict)
    # Calls removed by trimming, kept for the checkers; the product does not see them.
    gone: dict[CallKey, CallRow] = field(default_factory=dict)
    # Life-cycle events by store and id; nothing relays them during the simulation.
    outbox: dict[tuple[str, str], tuple[RunKey, datetime]] = field(default_factory=dict)
    usage: dict[UsageKey, Used] = field(default_factory=dict)
    written_at: dict[RunKey, list[float]] = field(default_factory=dict, compare=False)
    seen_time: datetime | None = field(default=None, compare=False)
    server: DatabaseServer = field(default_factory=DatabaseServer, compare=False)

    def conversation_of(self, run: RunRow) -> ConversationRow | None:
        return self.conversations.get(ConversationKey(run.store_id, run.conversation_id))

    def calls_of(self, key: RunKey) -> list[CallRow]:
        calls = [call for call in self.calls.values() if RunKey(call.store_id, call.run_id) == key]
        return sorted(calls, key=lambda call: (call.round, call.index, call.call_id))

    def shown(self, key: ConversationKey) -> list[MessageRow]:
        """Return the messages of a conversation in order, including inherited ones."""
        return [row for each in self.segments.get(key, ()) for row in self.of_segment(key, each)] + [
            *self.messages.get(key, ())
        ]

    def of_segment(self, key: ConversationKey, segment: Segment | SegmentRow) -> list[MessageRow]:
        every = self.messages.get(ConversationKey(key.store_id, segment.source_conversation_id), ())
        return [row for row in every if segment.first_number <= row.number <= segment.last_number]

    def kept(self, store_id: StoreId, path: Sequence[Segment]) -> tuple[int, int]:
        """Return the number up to which the newest summary applies, and how many messages follow."""
        key = ConversationKey(store_id, ConversationId(""))
        rows = [row for each in path for row in self.of_segment(key, each)]
        end = max((row.summarised_to for row in rows), default=0)
        return end, sum(row.number > end for row in rows)

    def unread(self, key: RunKey) -> list[CommandRow]:
        commands = [
            row for row in self.commands.values() if RunKey(row.store_id, row.run_id) == key and not row.consumed
        ]
        return sorted(commands, key=lambda row: row.number)


def continues(tables: Tables, known: HistoryPrefix, whole: Loaded) -> bool:
    """Return whether a run's history still starts with a known prefix."""
    key = ConversationKey(whole.run.store_id, whole.run.conversation_id)
    author = tables.conversations[key].author(whole.run.user_id)
    every = tables.shown(key)
    end = max((row.summarised_to for row in every if row.user_id == author), default=0)
    rows = [row for row in every if end < row.number <= known.last_number]
    counts = PrefixCounts(
        end_number=end,
        message_count=len(rows),
        own_count=sum(row.user_id == author for row in rows),
        last_message_id=next((row.message_id for row in rows if row.number == known.last_number), None),
    )
    return not whole.run.reports_to and is_valid(known, counts)


class Database:
    """The tables behind a connection that can fail. `owner` is the connected process."""

    def __init__(self, tables: Tables, chance: Chance, history: History, owner: str) -> None:
        self.tables = tables
        self.history = history
        self._chance = chance
        self._draw = chance.stream("database", owner)

    def now(self) -> datetime:
        time = asyncio.get_running_loop().time() + self.tables.server.ahead_seconds
        return datetime.fromtimestamp(round(time, 6), UTC)

    async def reach(self, *, writes: bool = False) -> None:
        if self._chance.strikes(self._draw, "database away", _FAILURE_RATE):
            raise DependencyUnavailable("the database is unreachable")
        await asyncio.sleep(_TRANSACTION_SECONDS * self._draw.random())
        if writes and self.tables.server.read_only:
            raise self.tables.server.refusal("cannot execute in a read-only transaction")

    async def answer(self) -> None:
        if self._draw.random() < _SLOW_ANSWERS:
            await asyncio.sleep(_TRANSACTION_SECONDS * self._draw.random())
        if self._chance.strikes(self._draw, "commit unanswered", _FAILURE_RATE):
            raise DependencyUnavailable("the connection broke")

    def conflicts(self) -> bool:
        return self._chance.strikes(self._draw, "conflict", 0.01)


def reached(
    *, writes: bool = False, answers: bool = False
) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]]:
    """Make a method a request to the database `_memory`.

    The body runs at one instant. The request may be lost before it, and with `answers` its response after it.
    """

    def decorate(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
        @wraps(method)
        async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
            await self._memory.reach(writes=writes)
            result = method(self, *args, **kwargs)
            if answers:
                await self._memory.answer()
            return result

        return call

    return decorate


class PromptDatabase(Database):
    """Private tables that take no time and never fail, with the clock of a test."""

    def __init__(self, now: Callable[[], datetime], history: History) -> None:
        super().__init__(Tables(), Chance(0, calm=True), history, "test")
        self._now = now

    def now(self) -> datetime:
        return self._now()

    async def reach(self, *, writes: bool = False) -> None:
        return

    async def answer(self) -> None:
        return


class MemoryJournal:
    def __init__(self, database: Database, ids: IdSource, cache: RunCache) -> None:
        self._database = database
        self._ids = ids
        self.cache = cache

    async def write(self, operations: Sequence[Operation[Any]]) -> Written:
        await self._database.reach(writes=True)
        if self._database.conflicts():
            raise GroupConflict
        written = self.apply(operations)
        await self._database.answer()
        return written

    def apply(self, operations: Sequence[Operation[Any]]) -> Written:
        tables = self._database.tables
        keys = [operation.row_keys for operation in operations]
        unit = load(tables, self._ids, list(map(steps.loaded_with, keys)), now=self._database.now())
        self.cache.note_time(unit.now)
        outcomes: list[Any] = []
        for operation in operations:
            before, barrier = _fenced_row(unit, operation), rules_of_jobs.unstarted_turn(unit, operation)
            try:
                with unit.attempt():
                    outcomes.append(operation.apply(unit))
            except PawlError as error:
                outcomes.append(error)
            except Exception as error:  # noqa: BLE001  # as the real one does; here it is a finding
                self._database.history.unexpected(type(operation).__name__, error)
                outcomes.append(error)
            self._check_fence(unit, operation, before)
            if barrier is not None:
                self._judge("messages_pass_turns", rules_of_jobs.delayed_message(unit, barrier, outcomes[-1]))
            self._tell(operation, outcomes[-1])
        freed = unit.runs.changed()
        rows = self._store(unit)
        for key in {key.step for key in keys if key.step is not None}:
            run = unit.runs.get(key)
            if run is not None and unit.runs.has_changed(key):
                cached = steps.after(unit, key, tables.runs[key], self.cache.get(key))
                if cached is not None:
                    self.cache.put(cached)
        for _, conversation in unit.conversations.changed():
            self._judge("jobs_are_counted", rules_of_jobs.miscounted(tables.runs.values(), conversation))
            self._judge("one_iteration_waits", rules_of_jobs.jobs_with_several_notices(conversation))
            self._judge("one_run_at_a_time", rules_of_jobs.concurrent_runs(tables.runs.values(), conversation))
        return Written(
            outcomes=outcomes,
            events=rows,
            wakeups=unit.wakeups.rows,
            conversations=changed_conversations(unit),
            work_ready=unit.work_ready or any(before.is_active and not run.is_active for before, run in freed),
            lifecycle_count=0,
        )

    def _store(self, unit: UnitOfWork) -> list[LogRow]:
        tables, events = self._database.tables, [(event, encode_event(event)) for event in unit.events.rows]
        store(tables, unit, events)
        return log_rows.pack(events)

    def _check_fence(self, unit: UnitOfWork, operation: Operation[Any], before: RunRow | None) -> None:
        """I4, checked immediately: a step with an old epoch leaves the row unchanged."""
        if not isinstance(operation, Commit) or before is None:
            return
        after = unit.runs.get(before.key)
        if after is not before and (before.epoch != operation.epoch or before.worker_id is None):
            text = f"run {before.run_id} at epoch {before.epoch} was changed by epoch {operation.epoch}"
            self._database.history.violation("stale_epochs_change_nothing", text)

    def _judge(self, checker: str, found: str) -> None:
        if found:
            self._database.history.violation(checker, found)

    def _tell(self, operation: Operation[Any], outcome: Any) -> None:
        what = type(operation).__name__
        run = getattr(operation, "run", None)
        more = getattr(operation, "commit_id", "") or getattr(operation, "command_id", "")
        said = outcome.reason if isinstance(outcome, PawlError) else getattr(outcome, "outcome", "ok")
        self._database.history.tell(f"ledger {what} {run.run_id if isinstance(run, RunKey) else ''} {more} {said}")


def _fenced_row(unit: UnitOfWork, operation: Operation[Any]) -> RunRow | None:
    return unit.runs.get(operation.run) if isinstance(operation, Commit) else None


def load(tables: Tables, ids: Ids, named: Sequence[RowKeys], *, now: datetime) -> UnitOfWork:
    """Return a unit of work with all named rows, as `adapters.loading` loads them."""
    unit = UnitOfWork(ids)
    unit.now = now
    unit.iterations_kept = ITERATIONS_KEPT
    named = [_with_keyed(tables, keys) for keys in named]
    _put(named, lambda keys: keys.schedules, tables.schedules, unit.schedules.load)
    if any(keys.triggers for keys in named):
        named = [*named, tables.starters.load(unit, named)]
    requests = _put(named, lambda keys: keys.requests, tables.requests, unit.requests.load)
    of_runs = [tables.runs[key] for key in _keys(named, lambda n: (*n.conversations_of, *n.ends)) if key in tables.runs]
    submitted = _keys(named, lambda keys: keys.conversations)
    stopped = _keys(named, lambda keys: keys.stopped)
    made = [ConversationKey(row.store_id, row.conversation_id) for row in requests if row.conversation_id]
    wanted = [*submitted, *made, *(ConversationKey(run.store_id, run.conversation_id) for run in of_runs)]
    reported_to = ((run.store_id, each) for run in of_runs for each in (run.reports_to, run.root_conversation_id))
    wanted += [ConversationKey(*key) for key in reported_to if key[1]]
    conversations = [tables.conversations[key] for key in dict.fromkeys(wanted) if key in tables.conversations]
    for row in conversations:
        unit.conversations.load(row.key, row)
    keys: dict[RunKey, None] = dict.fromkeys(_keys(named, lambda keys: keys.runs))
    keys.update(dict.fromkeys(RunKey(row.store_id, row.run_id) for row in requests))
    endings = _endings(tables, named)
    entered: list[RunKey] = []
    for row in conversations:
        if row.key in submitted and row.active_run_id is not None:
            entered.append(RunKey(row.store_id, row.active_run_id))
        passed = len(row.interrupting) if endings[row.key] else 0
        passed = len(row.queue) if (row.key, row.user_id) in stopped else passed
        keys.update(dict.fromkeys(RunKey(row.store_id, run_id) for run_id in row.notified))
        waiting = [RunKey(row.store_id, run_id) for run_id in row.queue[: endings[row.key] + passed]]
        keys.update(dict.fromkeys(waiting))
        entered += waiting[:passed]
    ending = [key for key in [*_keys(named, lambda n: n.ends), *entered] if key in tables.runs]
    callers = [
        RunKey(key.store_id, run_id)
        for key in ending
        for run_id in (tables.runs[key].parent_run_id, *tables.runs[key].agents_above)
    ]
    for run_key in [*keys, *entered, *callers]:
        if run_key in tables.runs and unit.runs.get(run_key) is None:
            unit.runs.load(run_key, tables.runs[run_key])
    calls = [call for key in _keys(named, lambda n: n.calls_of) for call in tables.calls_of(key)]
    for call in calls:
        if not call.state.is_terminal:
            unit.load_call(call)
    done = [CallKey(run.store_id, run.parent_call_id) for _, run in unit.runs.items()]
    for call_key in [*_keys(named, lambda keys: keys.calls), *done]:
        if call_key in tables.calls and unit.calls.get(call_key) is None:
            unit.load_call(tables.calls[call_key])
    for run_key in dict.fromkeys([*_keys(named, lambda n: n.commands_of), *entered]):
        for command in tables.unread(run_key):
            unit.load_command(command)
    for queue_key, _, slots in _keys(named, lambda keys: keys.queues):
        runs = [run for run in tables.runs.values() if QueueKey(run.store_id, run.in_background) == queue_key]
        queued, active = sum(run.needs_slot(unit.now) for run in runs), sum(run.is_active for run in runs)
        unit.queues.load(queue_key, Queue(queued=queued, active=active, slots=slots))
    for command_key in _keys(named, lambda keys: keys.commands):
        if command_key in tables.commands and unit.commands.get(command_key) is None:
            unit.load_command(tables.commands[command_key])
    for store_id, path in _keys(named, lambda keys: keys.paths):
        unit.kept[store_id, path] = tables.kept(store_id, path)
    return unit


def store(tables: Tables, unit: UnitOfWork, events: Iterable[tuple[Event, bytes]]) -> None:
    for before, after in unit.schedules.changed():
        last = RunKey(before.store_id, before.last_run_id)
        run = unit.runs.get(last) or tables.runs.get(last)
        is_busy = run is not None and not run.state.is_terminal
        latest = tables.schedule_claims.get(before.key)
        tables.schedule_changes.append(ScheduleChange(before, after, unit.now, latest, is_fire=True, is_busy=is_busy))
    tables.schedules.update(unit.schedules.items())
    tables.starters.store(unit)
    tables.requests.update(unit.requests.items())
    tables.conversations.update(unit.conversations.items())
    keyed = [row.client_key for row in tables.conversations.values() if row.key_hash is not None]
    assert len(keyed) == len({*keyed}), "a key has one conversation"
    for segment in unit.segments.rows:
        tables.segments.setdefault(ConversationKey(segment.store_id, segment.conversation_id), []).append(segment)
    for key, used in added(unit, own_usage):
        tables.usage[key] = tables.usage.get(key, Used()).plus(used)
    tables.runs.update(unit.runs.items())
    tables.calls.update(unit.calls.items())
    tables.commands.update(unit.commands.items())
    for trim in unit.trims.rows:
        _remove(tables, trim)
    tables.loop_states.update(unit.loop_states.items())
    for message in unit.messages.rows:
        messages = tables.messages.setdefault(ConversationKey(message.store_id, message.conversation_id), [])
        assert not messages or messages[-1].number < message.number, "message numbers are unique"
        messages.append(message)
    for event, payload in events:
        run_key = RunKey(event.store_id, event.run_id)
        log = tables.events.setdefault(run_key, [])
        assert len(log) + 1 == event.seq, "seqs are unique and without gaps"
        log.append(payload)
        if event.lifecycle_type:
            tables.outbox[event.store_id, event.event_id] = (run_key, event.time)
        tables.written_at.setdefault(run_key, []).append(asyncio.get_running_loop().time())


def _remove(tables: Tables, trim: Trim) -> None:
    calls = [call for call in tables.calls_of(trim.run) if call.round <= trim.round and call.state.is_terminal]
    for call in calls:
        tables.gone[call.key] = tables.calls.pop(call.key)
        decided = [row.key for row in tables.commands.values() if row.call_id == call.call_id and row.consumed]
        for key in decided:
            if RunKey(key.store_id, key.run_id) == trim.run:
                del tables.commands[key]
    run = tables.runs[trim.run]
    failures = sum(call.state is not CallState.SUCCEEDED for call in calls)
    tables.runs[trim.run] = replace(run, trimmed_failures=run.trimmed_failures + failures)
    tables.trimmed[trim.run] = trim.seq


def _endings(tables: Tables, named: Sequence[RowKeys]) -> Counter[ConversationKey]:
    """Return the number of operations in each conversation that may let its next run start."""
    endings: Counter[ConversationKey] = Counter()
    for keys in named:
        endings.update(keys.conversations)
        for key in keys.ends:
            if key in tables.runs:
                endings[ConversationKey(key.store_id, tables.runs[key].conversation_id)] += 1
    return endings


def _with_keyed(tables: Tables, keys: RowKeys) -> RowKeys:
    """Add the conversations that the operations name by client key."""
    found = [row.key for row in tables.conversations.values() if row.client_key in keys.keyed]
    return replace(keys, conversations=(*keys.conversations, *found)) if found else keys


def _keys(named: Sequence[RowKeys], pick: Callable[[RowKeys], Iterable[Any]]) -> list[Any]:
    return list(dict.fromkeys(key for keys in named for key in pick(keys)))


def _put(
    named: Sequence[RowKeys],
    pick: Callable[[RowKeys], Iterable[Any]],
    rows: Mapping[Any, Any],
    take: Callable[[Any, Any], None],
) -> list[Any]:
    found = [key for key in _keys(named, pick) if key in rows]
    for key in found:
        take(key, rows[key])
    return [rows[key] for key in found]
