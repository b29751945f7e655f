"""Interfaces and values for reads, claims and leases, which do not change the ledger's content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Generic, Protocol, TypeVar

from pawl.chassis.ids import CallId, CallKey, CommandId, ConversationId, RunId, RunKey, StoreId, UserId, WorkerId
from pawl.job_store.ledger.rules.offers import is_pending
from pawl.job_store.ledger.rules.prefix import HistoryPrefix
from pawl.job_store.ledger.rules.rows import (
    CallRow,
    ClientKey,
    CommandRow,
    ConversationKey,
    ConversationRow,
    MessageRow,
    RequestKey,
    RequestRow,
    RunRow,
    Segment,
)
from pawl.job_store.ledger.rules.waiting import Situation
from pawl.values import CallState, RunState

R = TypeVar("R")

# Maximum number of open calls per run in a list of runs.
OPEN_CALLS_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A run that a worker holds.

    `is_quiet` means that the run has just been claimed and that no client holds any of its calls. Such a run is new, or
    was waiting for a certain time and nothing else. Only a claim, not a renewal, sets the conversation, the number of
    its last message, and how long the run was due.
    """

    store_id: StoreId
    run_id: RunId
    epoch: int
    in_background: bool = False
    is_quiet: bool = False
    conversation_id: ConversationId = ConversationId("")
    last_number: int = 0
    waited_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    runs: tuple[Claimed, ...]
    with_commands: tuple[Claimed, ...]
    time: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run and its pending calls.

    `waits`, if set, also covers child runs. `active` contains the other open calls, if those were read. `situations`
    then explains why the run is not making progress: the run's own situation comes first, followed by the situations of
    its descendants.
    """

    run: RunRow
    pending: tuple[CallRow, ...]
    waits: tuple[int, ...] | None = None
    active: tuple[CallRow, ...] = ()
    situations: tuple[Situation, ...] = ()


def view_of(situations: Sequence[Situation]) -> RunView:
    """Return the view of the first run. It also includes the open calls of the other runs, its descendants."""
    run = situations[0].run
    waits = {wait for each in situations for wait in each.run.waits}
    open_calls = [(each.run, call) for each in situations for call in each.calls]
    return RunView(
        run=run,
        pending=tuple(call for row, call in open_calls if is_pending(row, call)),
        waits=tuple(sorted(waits)) if run.waits else run.waits,
        active=tuple(call for row, call in open_calls if not is_pending(row, call)),
        situations=tuple(situations),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingFilter:
    """A filter on pending items. With a user, it selects that user's items.

    Otherwise, it selects all items that approvers may see. Empty fields match everything. States and a tool name match
    only calls. With `approves`, a user's calls include calls that only approvers may decide on.
    """

    user_id: UserId
    approves: bool = False
    states: tuple[CallState, ...] = ()
    tool_name: str = ""
    conversation_id: ConversationId = ConversationId("")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """A filter on a user's runs, and their order by creation time. By default, the newest run comes first.

    Empty fields match everything. A run must match one of `waits` and all of `labels`. `reports_to` is the conversation
    that jobs report to. `running_jobs_of_store` matches all users' open jobs that are not being stopped. It can be
    combined only with `stopped_by`. `stopped_by` also matches jobs that this command has stopped. With `reports_to`,
    jobs stopped by another command do not match.
    """

    conversation_id: ConversationId = ConversationId("")
    states: tuple[RunState, ...] = ()
    oldest_first: bool = False
    create_time_from: datetime | None = None
    create_time_before: datetime | None = None
    waits: tuple[int, ...] = ()
    parent_run_id: RunId = RunId("")
    agent_name: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    reports_to: ConversationId = ConversationId("")
    jobs_only: bool = False
    running_jobs_of_store: bool = False
    stopped_by: CommandId = CommandId("")


# Maximum number of notices that are loaded with a run. The rest are loaded once these have been entered.
NOTICES_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingNotices:
    """The first `NOTICES_MAX` pending notices for a run's user, each with its job and iteration.

    `open_jobs` is the number of the user's open jobs that report to the run's conversation. If the run is delegated,
    `jobs_below` is the number of open jobs whose notices go to the run itself.
    """

    notices: Sequence[tuple[RunRow, int]] = ()
    open_jobs: int = 0
    jobs_below: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Everything that a run's worker needs, read from one snapshot.

    `user_id` is the user of the conversation. Call results are omitted if they are too large in total. `omitted_bytes`
    contains the size of each omitted result, and 0 for the others. The messages of other users' runs are included
    without calls or summaries, and only for the newest runs that fit completely. `failures` contains the failures of
    FAILED runs that have messages. `shared_tokens_left` is what remains of the run's token budget. It is 0 if the run
    that owns the budget was removed, and None if there is no budget. If `known` is set, that prefix is still valid, and
    the messages and calls continue it.
    """

    run: RunRow
    user_id: UserId
    known: HistoryPrefix | None
    messages: Sequence[MessageRow]
    calls: Sequence[CallRow]
    omitted_bytes: Mapping[str, int]
    commands: Sequence[CommandRow]
    loop_state: bytes
    time: datetime
    failures: Mapping[RunId, bytes]
    pending_notices: PendingNotices
    shared_tokens_left: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogGap:
    """A gap that replaces the removed events from `from_seq` to `to_seq`, with a snapshot of the run.

    For an ended run, the snapshot contains the newest messages and calls, and the number of omitted ones. For an open
    job with a trimmed log, the snapshot contains no calls, and `omitted_calls` is the number of removed calls. Large
    results are omitted: `omitted_bytes` contains the size of each omitted result, and 0 for the others.
    """

    from_seq: int
    to_seq: int
    run: RunRow
    messages: Sequence[MessageRow]
    calls: Sequence[CallRow]
    omitted_bytes: Mapping[str, int]
    omitted_messages: int
    omitted_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A part of a run's log: the bytes of its events. If events were removed, a gap comes first."""

    payloads: Sequence[bytes]
    last_seq: int
    ended: bool
    gap: LogGap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[R]):
    rows: Sequence[R]
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePage(Page[MessageRow]):
    user_id: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedRuns:
    """Versions of a user's changed runs in a conversation, oldest first, as read at `time`.

    The version of a run changes whenever the run, its calls, or the runs that execute its calls change. The version is
    empty while one of them is waiting to be claimed, because the reasons for that wait depend on other runs.

    `open_run_ids` and `conversation_ids` cover all of the user's open runs, even those that have not changed.
    """

    time: datetime
    versions: Mapping[RunId, str]
    open_run_ids: Sequence[RunId]
    conversation_ids: Sequence[ConversationId]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFilter:
    """A filter on a user's conversations: by archive state, word prefixes and labels.

    Fields that are None or empty match everything. With `shared`, the filter applies to conversations that other users
    share, instead of the user's own.
    """

    archived: bool | None = None
    words: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    shared: bool = False

    @property
    def kinds(self) -> tuple[bool, ...]:
        return (False, True) if self.archived is None else (self.archived,)


class DueTimes(Protocol):
    """Times from which runs may be claimed. All times are the database's."""

    async def times(self) -> tuple[datetime, datetime]:
        """Return the database's current time, and the latest time its clock has ever shown, accurate to within 5 s.

        If the second time is later, the clock was set back, and no replica has called `bring_forward` since then.
        """

    async def bring_forward(self, seconds: float) -> int:
        """Make runs claimable this many seconds earlier after the clock was set back. Return the number of runs.

        Runs that were due are due again, and leases expire soon. Leases of up to 30 s that were granted or renewed
        after the clock was set back do not change. It is safe to repeat the call, because a run that is claimed too
        early simply waits again.
        """


class Leases(DueTimes, Protocol):
    """Workers' leases on runs. All times are the database's."""

    async def claim(
        self, worker_id: WorkerId, *, runs_max: int, lease_seconds: float, background_runs_max: int
    ) -> list[Claimed]:
        """Claim up to `runs_max` runs for a worker, and give each a new epoch.

        Afterwards, the worker holds at most `background_runs_max` background runs, unless it already held more.

        Claims are fair between stores. Every store is served once before any store is served again. The next claim
        continues after the last store served.
        """

    async def wait_seconds(self) -> float | None:
        """Return the number of seconds until the next run or lease is due, or None if nothing will become due.

        Zero or less means that a run is due, or that the time was not computed because too many stores have runs.
        """

    async def renew(self, worker_id: WorkerId, *, lease_seconds: float) -> Renewed:
        """Renew all of a worker's leases. This includes expired leases, unless another worker has claimed the run."""

    async def release(self, worker_id: WorkerId) -> int:
        """Release all of a worker's runs, so that they can be claimed immediately. Return how many were released."""


class Reads(Protocol):
    """Reads from the ledger.

    Another user's data is reported as not found, like data that does not exist.

    An empty `user_id` means that the reader is a service.
    """

    async def run(self, key: RunKey, user_id: UserId) -> RunView:
        """Return a run from one snapshot, with its waits and the waits of the runs that execute its calls.

        Raises:
            RunNotFound: The user has no such run.
        """

    async def loop_state(self, key: RunKey) -> bytes:
        """Return the state that the run's owner stored with its last commit, or an empty state before the first commit.

        Raises:
            RunNotFound: The run does not exist.
        """

    async def load(self, key: RunKey, epoch: int, known: HistoryPrefix | None = None, last_number: int = 0) -> Loaded:
        """Return everything that a run's owner needs, from one snapshot.

        `known` is the prefix of the history that the owner already has. If the prefix is still valid, the result does
        not include it. If `last_number` is set, the caller need not be the owner, and gets the history as it was when
        the message with this number was the conversation's last.

        Raises:
            RunNotFound: The run does not exist.
            LeaseLost: The caller no longer holds the run.
        """

    async def load_first(self, claims: Mapping[RunKey, int]) -> dict[RunKey, Loaded]:
        """Load each claimed run that is new and the only one in its conversation. `claims` maps runs to epochs."""

    async def commands(self, key: RunKey) -> tuple[list[CommandRow], PendingNotices]:
        """Return the unread commands of a run in order of arrival, and the notices for it.

        Raises:
            RunNotFound: The run does not exist.
        """

    async def call(self, key: CallKey, user_id: UserId, *, for_approval: bool = False) -> CallRow:
        """Return a call.

        Another user's call is returned only if it asks this user a question or, with `for_approval`, if it needs or
        needed approval.

        Raises:
            CallNotFound: The user has no such call.
        """

    async def call_heads(
        self, store_id: StoreId, call_ids: Sequence[CallId], user_id: UserId, *, result_bytes_max: int
    ) -> list[tuple[CallRow, int]]:
        """Return the user's calls with these ids, without arguments or spec. Unknown ids are skipped.

        Omit results larger than `result_bytes_max`. Each row includes the size of its omitted result, or 0.
        """

    async def runs(
        self,
        store_id: StoreId,
        user_id: UserId,
        wanted: RunFilter,
        *,
        after: tuple[datetime, str] | None,
        rows_max: int,
    ) -> Page[Situation]:
        """Return a user's runs in the filter's order, starting after `after`, from one snapshot.

        Each run has at most `OPEN_CALLS_MAX` of its open calls, without their large fields.
        """

    async def calls(
        self, key: RunKey, user_id: UserId, *, after: tuple[int, int, str] | None, rows_max: int
    ) -> Page[CallRow]:
        """Return a run's calls in call order, starting after `after`.

        This also works for another user's run if the conversation and its calls are shared.

        Raises:
            RunNotFound: The user has no such run.
        """

    async def pending(
        self, store_id: StoreId, wanted: PendingFilter, *, after: tuple[datetime, str] | None, rows_max: int
    ) -> Page[CallRow]:
        """Return the calls waiting for a user or a client, oldest first, starting after `after`."""

    async def short_of_tokens(
        self, store_id: StoreId, wanted: PendingFilter, *, after: tuple[datetime, str] | None, rows_max: int
    ) -> Page[RunRow]:
        """Return the runs waiting for tokens, oldest first, starting after `after`."""

    async def messages(
        self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId, *, after: int, rows_max: int
    ) -> MessagePage:
        """Return a conversation's messages after number `after`.

        Raises:
            ConversationNotFound: The user has no such conversation.
            ConversationErased: The conversation was erased.
        """

    async def changed_runs(
        self, conversation: ConversationRow, user_id: UserId, *, since: datetime | None, all_open: bool
    ) -> ChangedRuns:
        """Return the user's runs that have changed since the time `since`. With `all_open`, also return all open runs.

        This covers runs in the conversation, jobs that report to it, and the child runs of both. Only the newest 200
        ended runs and the newest 100 ended jobs are considered. A run also counts as changed while it is waiting for a
        child run.
        """

    async def versions(self, keys: Sequence[ConversationKey]) -> Sequence[str]:
        """Return each conversation's version, which changes with the conversation, its active run and its recent jobs.

        A version is empty if the conversation does not exist.
        """

    async def events(self, key: RunKey, user_id: UserId, *, after_seq: int, events_max: int) -> LogPart:
        """Return a run's events after `after_seq`, up to `events_max` events or about 1 MiB.

        Return at least one event if there are any. A gap replaces removed events, and is followed by the events after
        it.

        Raises:
            RunNotFound: The user has no such run.
        """


class ConversationReads(Protocol):
    """Reads conversations. Another user's unshared data is reported as not found."""

    async def by_id(self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId) -> ConversationRow:
        """Return a conversation.

        Raises:
            ConversationNotFound: The user has no such conversation.
            ConversationErased: The conversation was erased.
        """

    async def by_key(self, key: ClientKey) -> ConversationRow:
        """Return the conversation that has this client-chosen key.

        Raises:
            ConversationNotFound: The user has no such conversation.
        """

    async def listed(
        self,
        store_id: StoreId,
        user_id: UserId,
        wanted: ConversationFilter,
        *,
        before: tuple[datetime, str] | None,
        rows_max: int,
    ) -> Page[ConversationRow]:
        """Return conversations that users started, most recently changed first, starting after the position `before`.

        A search for a very common word may miss matches.
        """

    async def segments(self, conversation: ConversationRow) -> tuple[Segment, ...]:
        """Return the segments of a fork's past, in order, or an empty tuple if the conversation is not a fork."""

    async def request(self, key: RequestKey) -> RequestRow | None:
        """Return the earlier request with this key, or None if there is none."""
