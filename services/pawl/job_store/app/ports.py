"""The ports of the use cases, in their own verbs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, TypeVar

from pawl.chassis.clock import Clock
from pawl.chassis.ids import CallKey, ClientId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.errors import PawlError
from pawl.job_store.app.reading import ConversationReads, DueTimes, Leases, Page, Reads, RunView
from pawl.job_store.domain import inbox
from pawl.job_store.domain.places import PlaceLimits
from pawl.job_store.domain.unit_of_work import RowKeys, UnitOfWork, Wakeup
from pawl.job_store.domain.usage import Used
from pawl.values import TitleTask

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


class LifecycleStream(Protocol):
    """The stream of life-cycle events. It may lose what it has stored, the end of it or all."""

    async def end(self) -> StreamEnd | None:
        """Make sure that the stream is there; returns what it was like then, or None while it is away."""

    async def send(self, events: Sequence[Lifecycle]) -> Mapping[int, int]:
        """Send events in order to the stream that `end` last told of; returns the stored ones' `outbox_id` and seq.

        One that is larger than the stream ever takes is left out, with seq 0.

        Those that are not returned may have been stored as well: sending them again is safe.
        """


class Outbox(Protocol):
    """Life-cycle events that the stream does not have yet, or has lost."""

    async def relay(self, stream: LifecycleStream, *, events_max: int) -> int:
        """Send the oldest events and lay those aside that were stored; returns how many that were.

        One replica relays at a time; the others get 0 meanwhile. 0 also means
        that the stream is away: then nothing is lost.
        """


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


class Retention(Protocol):
    """Removes what is old."""

    async def remove_requests(self, *, older_than_seconds: float, rows_max: int) -> int:
        """Forget request ids; returns how many."""

    async def remove_keys(self, *, older_than_seconds: float, rows_max: int) -> int:
        """Forget API keys that were revoked or expired so long ago; returns how many."""

    async def remove_key_events(self, *, rows_max: int) -> int:
        """Remove events of API keys that are older than 90 days, and failed logins but the last; returns how many."""

    async def remove_usage(self, *, rows_max: int) -> int:
        """Forget what was used more than 400 days ago; returns how many rows."""

    async def remove_trigger_events(self, *, older_than_seconds: float, rows_max: int) -> int:
        """Forget events that fired triggers so long ago, and what none has waited for since; returns how many rows."""

    async def remove_unsent(self, *, older_than_seconds: float, rows_max: int) -> int:
        """Give up life-cycle events that no stream has taken for so long; returns how many."""

    async def remove_sent(self, *, older_than_seconds: float, rows_max: int) -> int:
        """Forget life-cycle events that were sent so long ago: they cannot be sent again; returns how many."""

    async def trim_logs(self, *, older_than_seconds: float, events_max: int) -> int:
        """Remove all commands, and all events but the last one, of runs that ended so long ago; returns how many runs.

        Of one run at least, then as many as have `events_max` events in all. Runs whose life-cycle events
        the stream does not have yet are left.
        """

    async def remove_summarised(self, *, older_than_seconds: float, rows_max: int) -> int:
        """Remove runs of conversations in use that a summary has stood for so long; returns how many rows at least.

        With all that they hold, about `rows_max` of each kind at once. They had ended before the summary, and
        none of their messages is needed any more by the history for the model. 0 means that none is left.
        """

    async def remove_conversations(self, *, older_than_seconds: float, rows_max: int) -> int:
        """Remove conversations in which nothing happened for so long, with all that they hold; returns how many rows.

        About `rows_max` of each kind at once. From the first time on they are not there any more for anybody
        who asks for one of them by its id.
        """


class SearchIndex(Protocol):
    """Makes what was written findable, after it was written."""

    async def take_in(self, *, conversations_max: int) -> int:
        """Take in new messages and titles of some conversations; returns of how many, 0 if nothing is left to do now.

        Several replicas may do so at once. Nothing is taken in of what was removed or emptied meanwhile.
        """


class Titles(Protocol):
    """Keeps the titles that models make."""

    async def claim(self, *, titles_max: int) -> Sequence[TitleTask]:
        """Give conversations whose titles are to be made, and to nobody else for two minutes."""
        ...

    async def put(
        self, store_id: StoreId, conversation_id: ConversationId, attempt: int, text: str, used: Used
    ) -> None:
        """Keep the title in what a model has said, unless it is not waited for any more; count what that cost."""


class LedgerStats(Protocol):
    """Counts the ledger, for metrics."""

    async def count(self) -> Mapping[str, float]:
        """Return runs by open state (`QUEUED`...), the `outbox` backlog, `due_schedules` and `due_events`.

        The last two are those that nobody has claimed. Of jobs, and what they begin, `working`, `waiting` and `late`.
        Of the runs that are due, `claimable` are those that a worker could have now; the others wait for
        a place, `over_user_limit` of them also if their store had any number of places, `over_store_limit` not.
        """


class Meter(Protocol):
    """Counts what the ledger does."""

    def group_written(self, *, operations: int, seconds: float) -> None:
        """A group was committed."""

    def refused(self, error: PawlError) -> None:
        """An operation was refused."""

    def quarantined(self, runs: int) -> None:
        """Runs were quarantined because their workers died."""

    def relayed(self, events: int) -> None:
        """Life-cycle events reached the stream."""

    def schedule_fired(self, outcome: str, delay_seconds: float) -> None:
        """A schedule was fired so long after it was due."""

    def trigger_fired(self, outcome: str) -> None:
        """An event was fired, or found to be a duplicate."""

    def mailbox_unreachable(self) -> None:
        """A mailbox could not be read."""

    def webhook_refused(self, error: PawlError) -> None:
        """A webhook was refused before it could fire anything."""

    def ledger_counted(self, counts: Mapping[str, float]) -> None:
        """The ledger was counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a job store. Each worker may crash `crashes_max` times with a run."""

    crashes_max: int
    queue_max: int
    store_queue_max: int
    places: PlaceLimits
    inbox: inbox.Limits = inbox.LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The outside of the rules."""

    journal: Journal
    leases: Leases
    due_times: DueTimes
    reads: Reads
    conversations: ConversationReads
    offer_repository: OfferRepository
    attention_repository: AttentionRepository
    announcer: Announcer
    meter: Meter
    clock: Clock
