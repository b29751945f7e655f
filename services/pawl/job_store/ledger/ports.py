"""The ports of the use cases, in their own verbs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, TypeVar

from pawl.chassis.ids import CallKey, ClientId, RunId, RunKey, StoreId, UserId
from pawl.chassis.process.clock import Clock
from pawl.job_store.ledger.metrics import PrometheusMeter
from pawl.job_store.ledger.reading import ConversationReads, Leases, Page, Reads, RunView
from pawl.job_store.ledger.rules import inbox
from pawl.job_store.ledger.rules.places import PlaceLimits
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork, Wakeup

T_co = TypeVar("T_co", covariant=True)


class Operation(Protocol[T_co]):
    """One change of the ledger. Pure: it sees and changes only the rows it names."""

    @property
    def row_keys(self) -> RowKeys:
        """The rows it needs."""

    def apply(self, unit: UnitOfWork) -> T_co:
        """Change the unit and return the answer, or raise PawlError and change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEvent:
    """An event as the log keeps it, and as it may be seen once it is durable."""

    store_id: StoreId
    run_id: RunId
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A group that is durable. `outcomes` are the answers of its operations, in order: a reply or why not."""

    outcomes: Sequence[Any | Exception]
    events: Sequence[LiveEvent]
    wakeups: Sequence[Wakeup]
    work_ready: bool
    lifecycle_count: int
    inboxes: Collection[tuple[StoreId, UserId]] = ()


class GroupConflict(Exception):
    """Another transaction came between; nothing was written. The same group may be tried again."""


class Journal(Protocol):
    """Applies groups of operations to the stored rows."""

    async def write(self, operations: Sequence[Operation[Any]]) -> Written:
        """Apply the operations in order, each taken or refused on its own, in one transaction.

        Raises:
            GroupConflict: nothing was written; try again.
            DependencyUnavailable: the database is away; the group may have been written.
        """


class Announcer(Protocol):
    """Tells others what happened; best effort, never fails."""

    async def publish(self, events: Sequence[LiveEvent]) -> None:
        """Show events to those who watch."""

    async def wake(self, wakeups: Sequence[Wakeup]) -> None:
        """Tell workers that commands came for runs they hold."""

    async def work_ready(self) -> None:
        """Tell idle workers that a run became claimable."""

    async def inboxes_changed(self, inboxes: Collection[tuple[StoreId, UserId]]) -> None:
        """Tell those who watch what waits for these users to look again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """A life-cycle event on its way to outside subscribers."""

    outbox_id: int
    store_id: StoreId
    run_id: RunId
    event_id: str
    type: str
    time: datetime
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """The lifecycle stream, by the time at which it was made, and how far it went when it was looked at.

    As long as `look` is the same, nothing can have happened to the stream but that more was sent to it.
    """

    look: int
    create_time: datetime
    last_seq: int


class OfferRepository(Protocol):
    """Finds offers under a lease."""

    async def held_by(
        self, store_id: StoreId, user_id: UserId, client_id: ClientId, run_id: RunId
    ) -> tuple[tuple[RunKey, CallKey], ...]:
        """Return the calls that a client holds, of one run or, if `run_id` is empty, of all."""

    async def run_out(self, *, calls_max: int) -> tuple[tuple[RunKey, CallKey], ...]:
        """Return calls whose lease has ended, the longest ago first."""


class AttentionRepository(Protocol):
    """Finds runs that need an operator, or are about to."""

    async def doomed(self, *, crashes_max: int, runs_max: int) -> tuple[RunKey, ...]:
        """Return runs whose last allowed worker has lost its lease, the longest ago first. See `attention.Silence`."""

    async def listed(
        self, store_id: StoreId, *, run_id: RunId, after: tuple[datetime, str] | None, rows_max: int
    ) -> Page[RunView]:
        """Return the runs of a store that need an operator, with their calls in doubt, the longest waiting first.

        All of them, or, if it is not empty, only the one with `run_id`; from the one after `after` on.

        Raises:
            RunNotFound: there is no run with `run_id`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a job store. Each worker may crash `crashes_max` times with a run."""

    places: PlaceLimits
    # Another run of the same worker may have caused the first two crashes: from then on a run has a worker alone.
    crashes_max: int = 3
    queue_max: int = 100
    store_queue_max: int = 10_000
    inbox: inbox.Limits = inbox.LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The outside of the rules."""

    journal: Journal
    leases: Leases
    reads: Reads
    conversations: ConversationReads
    offer_repository: OfferRepository
    attention_repository: AttentionRepository
    announcer: Announcer
    meter: PrometheusMeter
    clock: Clock
