"""Interfaces that the ledger's use cases need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, TypeAlias

from pawl.chassis.ids import CallKey, ClientId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.chassis.process.clock import Clock
from pawl.job_store.ledger.metrics import PrometheusMeter
from pawl.job_store.ledger.reading import ConversationReads, Leases, Page, Reads, RunView
from pawl.job_store.ledger.rules import inbox
from pawl.job_store.ledger.rules.rows import CallRow, RunRow
from pawl.job_store.ledger.rules.slots import SlotLimits
from pawl.job_store.ledger.rules.unit_of_work import Operation, Wakeup
from pawl.values import Feature, WaitKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """Consecutive events of a run, stored as one row of its log. `events` is an encoded RunEvents message.

    The events are published once the row is durable.
    """

    store_id: StoreId
    run_id: RunId
    last_seq: int
    first_seq: int
    events: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The result of writing a group of operations, which is now durable.

    `outcomes` contains the result or the error of each operation, in order.
    """

    outcomes: Sequence[Any | Exception]
    events: Sequence[LogRow] = ()
    wakeups: Sequence[Wakeup] = ()
    work_ready: bool = False
    lifecycle_count: int = 0
    inboxes: Collection[tuple[StoreId, UserId]] = ()
    conversations: Collection[tuple[StoreId, ConversationId]] = ()
    started_runs: Sequence[RunRow] = ()
    ended_runs: Sequence[RunRow] = ()
    ended_calls: Sequence[CallRow] = ()


class GroupConflict(Exception):
    """Another transaction conflicted, and nothing was written. The same group may be retried."""


class Journal(Protocol):
    async def write_steps(self, operations: Sequence[Operation[Any]]) -> Written:
        """Write the steps of runs whose rows are cached. Skip runs whose rows have changed since they were cached.

        The outcome of a skipped operation is None. Raises the same errors as `write`.
        """

    async def write(self, operations: Sequence[Operation[Any]]) -> Written:
        """Apply the operations in order in one transaction.

        Each operation succeeds or fails independently.

        Raises:
            GroupConflict: Nothing was written. Try again.
            DependencyUnavailable: The database is unavailable. The group may have been written.
        """


class Announcer(Protocol):
    """Publishes notifications on a best-effort basis. Publishing never fails."""

    async def publish(self, events: Sequence[LogRow]) -> None: ...

    async def wake(self, wakeups: Sequence[Wakeup]) -> None:
        """Notify workers that commands have arrived for runs they hold."""

    async def work_ready(self) -> None:
        """Notify idle workers that a run has become claimable."""

    async def inboxes_changed(self, inboxes: Collection[tuple[StoreId, UserId]]) -> None:
        """Tell watchers of these users' pending items to poll again."""

    async def conversations_changed(self, conversations: Collection[tuple[StoreId, ConversationId]]) -> None:
        """Tell watchers of these conversations to read them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    outbox_id: int
    store_id: StoreId
    run_id: RunId
    event_id: str
    type: str
    time: datetime
    payload: bytes
    # The trace context of the run; may be empty.
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """The last known state of the life-cycle stream.

    While `poll_number` is unchanged, only messages from this process can have been added to the stream.
    """

    poll_number: int
    create_time: datetime
    last_seq: int


class OfferRepository(Protocol):
    async def held_by(
        self, store_id: StoreId, user_id: UserId, client_id: ClientId, run_id: RunId
    ) -> tuple[tuple[RunKey, CallKey], ...]:
        """Return the calls that a client holds in one run, or in all runs if `run_id` is empty."""

    async def run_out(self, *, calls_max: int) -> tuple[tuple[RunKey, CallKey], ...]:
        """Return front-end calls whose lease has expired, oldest first."""


class AttentionRepository(Protocol):
    async def doomed(self, *, crashes_max: int, runs_max: int) -> tuple[RunKey, ...]:
        """Return runs whose lease has expired and whose next crash would reach `crashes_max`, longest-expired first.

        See `attention.Silence`.
        """

    async def listed(
        self, store_id: StoreId, *, run_id: RunId, after: tuple[datetime, str] | None, rows_max: int
    ) -> Page[RunView]:
        """Return a store's runs that need an operator, with their calls in doubt. The longest-waiting runs come first.

        If `run_id` is set, return only that run. Start after `after`.

        Raises:
            RunNotFound: The run `run_id` does not exist.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a job store, or of one store in it.

    A run is quarantined after `crashes_max` workers crash on it.
    """

    slots: SlotLimits
    # Other runs on the same worker may have caused the first two crashes, so a worker holds at most one run on its
    # third attempt.
    crashes_max: int = 3
    queue_max: int = 100
    store_queue_max: int = 10_000
    inbox: inbox.Limits = inbox.LIMITS
    # Disabled features.
    off: frozenset[Feature] = frozenset()
    # Token budgets of the store and each user, by what a run waits for.
    tokens: Mapping[WaitKind, int] = field(default_factory=dict)
    # Models that the store may use; empty if it may use all.
    models: frozenset[str] = frozenset()
    model_server: str = ""
    # Limits of model calls; 0 for none.
    model_requests_per_minute: int = 0
    model_tokens_per_minute: int = 0
    conversation_retention_days: int = 30
    # 0 for no limit.
    events_per_second: int = 0
    # The store has reached its limit of stored bytes.
    is_full: bool = False
    # The maximums of some limits of new runs (pawl.event.v1.RunLimits).
    of_runs: Mapping[str, int] = field(default_factory=dict)

    def refused_model(self, models: Iterable[str]) -> str:
        """Return the first model in `models` that the store may not use, or an empty name if it may use all.

        An empty name in `models` means the default model.
        """
        return next((each for each in models if self.models and each and each not in self.models), "")


LimitsOf: TypeAlias = Callable[[StoreId], Limits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    journal: Journal
    leases: Leases
    reads: Reads
    conversations: ConversationReads
    offer_repository: OfferRepository
    attention_repository: AttentionRepository
    announcer: Announcer
    meter: PrometheusMeter
    clock: Clock
