"""Reads and claims that do not change what the ledger says: ports and their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Generic, Protocol, TypeVar

from pawl.chassis.ids import CallKey, CommandId, ConversationId, RunId, RunKey, StoreId, UserId, WorkerId
from pawl.job_store.ledger.rules.offers import is_pending
from pawl.job_store.ledger.rules.rows import (
    CallRow,
    ClientKey,
    CommandRow,
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

OPEN_CALLS_MAX: Final = 20
"""Most open calls of a run in a list of runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A run that a worker holds."""

    store_id: StoreId
    run_id: RunId
    epoch: int
    is_quiet: bool = False
    """True if it was claimed just now and no client holds a call of it: it has no step yet, or waited for a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """The leases that a worker holds, and which of its runs have unread commands."""

    runs: tuple[Claimed, ...]
    with_commands: tuple[Claimed, ...]
    time: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run and the calls that it waits for, and what it waits for if it is shown with those of other runs.

    `active` are its other open calls, where they are shown. `situations`, where they are known, say why it does not go
    on: its own, then those of runs that do calls of it or of each other.
    """

    run: RunRow
    pending: tuple[CallRow, ...]
    waits: tuple[int, ...] | None = None
    active: tuple[CallRow, ...] = ()
    situations: tuple[Situation, ...] = ()


def view_of(situations: Sequence[Situation]) -> RunView:
    """Return the view of the first of some runs with their open calls; the others do calls of it or of each other."""
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
    """A filter on all that waits: of one user, or with no user the calls and runs of all that approvers may see.

    Empty fields leave all; states and a tool's name leave no run.
    """

    user_id: UserId
    states: tuple[CallState, ...] = ()
    tool_name: str = ""
    conversation_id: ConversationId = ConversationId("")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """A filter on the runs of a user, and their order: by the time at which they were created, the newest first.

    Empty fields leave all. `waits` are the kinds of which a run waits for one, `labels` those of which it has all.
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
    """The conversation that jobs report to."""
    jobs_only: bool = False
    running_jobs_of_store: bool = False
    """True for jobs of all users that nobody has stopped and that have not ended: then it says nothing but the next."""
    stopped_by: CommandId = CommandId("")
    """The command whose jobs are wanted, too, if it has stopped them. With `reports_to` none that another one has."""


NOTICES_MAX: Final = 20
"""Most notices that are loaded with a run; the others follow once these have entered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The first `NOTICES_MAX` notices for a run's user that no model was told yet: the job and the occasion.

    `open_jobs` of that user and conversation have not ended.
    """

    notices: Sequence[tuple[RunRow, int]] = ()
    open_jobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """All that the owner of a run needs, as of one moment.

    Older results are left out when all together are too large: `omitted_bytes`
    has the size of each by call, 0 for those that are there. `user_id` is whose
    conversation it is. Of others than the user of the run there are messages, the newest
    runs whole as far as they go, and neither calls nor summaries.
    """

    run: RunRow
    user_id: UserId
    messages: Sequence[MessageRow]
    calls: Sequence[CallRow]
    omitted_bytes: Mapping[str, int]
    commands: Sequence[CommandRow]
    loop_state: bytes
    time: datetime
    failures: Mapping[RunId, bytes]
    """The failures of those runs that FAILED and brought some of the messages."""
    told: Told
    shared_tokens_left: int | None
    """The tokens left of the budget that the run uses; 0 if the owner of the budget was removed, None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogGap:
    """The place of the events from `from_seq` to `to_seq`, which were removed, with the run that they told of.

    That has ended, with its newest messages and calls, as far as they go, and the number of the others. Or it is a job
    of which the log was trimmed while it was open: without calls, those that were removed are counted. Large results
    are left out: `omitted_bytes` has the size of each by call, 0 for those that are there.
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
    """A part of the log of a run: the bytes of its events, and what stands before them if some were removed."""

    payloads: Sequence[bytes]
    last_seq: int
    ended: bool
    gap: LogGap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[R]):
    """Some rows, and whether there are more after them."""

    rows: Sequence[R]
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePage(Page[MessageRow]):
    """Some messages of a conversation, and whose that is."""

    user_id: UserId


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFilter:
    """A filter on the conversations of a user: archived or not, words with which words of theirs begin, all labels.

    None, no words and no labels leave all.
    """

    archived: bool | None = None
    words: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    shared: bool = False
    """Those that other users of the store share."""

    @property
    def kinds(self) -> tuple[bool, ...]:
        """The values of `archived` that it leaves."""
        return (False, True) if self.archived is None else (self.archived,)


class DueTimes(Protocol):
    """The times from which runs may be claimed, and the clock by which they are meant."""

    async def times(self) -> tuple[datetime, datetime]:
        """Return the database's time, and one that it is known to have had before.

        The second is later than the first if the clock went back and no replica has
        brought the runs forward since. It may be from five seconds before that.
        """

    async def bring_forward(self, seconds: float) -> int:
        """Let runs be claimed so much earlier, because the clock went back by that; returns how many.

        What was due is due again, and leases end soon; those of up to 30 s that were
        given or renewed since stay as they are. More than once does no harm.
        """


class Leases(DueTimes, Protocol):
    """Leases of workers on runs. All times are the database's."""

    async def claim(
        self, worker_id: WorkerId, *, runs_max: int, lease_seconds: float, background_runs_max: int
    ) -> list[Claimed]:
        """Give up to `runs_max` runs to a worker, each with a new epoch.

        With those that it has it then holds at most `background_runs_max` of the background, if it held no more before.
        With None it gets none of these, and no turns that notices begin.

        Fair between stores: each gets its turn before any gets a second one, as
        far as `runs_max` goes, and the next claim goes on where this one ended.
        """

    async def renew(self, worker_id: WorkerId, *, lease_seconds: float) -> Renewed:
        """Renew all leases of a worker, also those that ended and that nobody took."""

    async def release(self, worker_id: WorkerId) -> int:
        """Give all runs of a worker back, claimable at once; returns how many."""


class Reads(Protocol):
    """Reads of the ledger. What belongs to another user is not found, exactly as what is not there.

    An empty `user_id` reads for a service.
    """

    async def run(self, key: RunKey, user_id: UserId) -> RunView:
        """Return a run with what it waits for, and what those runs wait for that do its calls, as of one moment.

        Raises:
            RunNotFound: there is none for this user.
        """

    async def load(self, key: RunKey, epoch: int) -> Loaded:
        """Return all that the owner of a run needs, as of one moment.

        Raises:
            RunNotFound: there is no such run.
            LeaseLost: it is not the owner's any more.
        """

    async def commands(self, key: RunKey) -> tuple[list[CommandRow], Told]:
        """Return the unread commands of a run, in order of arrival, and what its conversation is told.

        Raises:
            RunNotFound: there is no such run.
        """

    async def call(self, key: CallKey, user_id: UserId, *, for_approval: bool = False) -> CallRow:
        """Return a call; with `for_approval` also one of another user that awaits its approval, or did.

        Raises:
            CallNotFound: there is none for this user.
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
        """Return runs of a user in the order of the filter, from the one after `after` on, as of one moment.

        Each has at most `OPEN_CALLS_MAX` of its open calls, without what may be large of them.
        """

    async def calls(
        self, key: RunKey, user_id: UserId, *, after: tuple[int, int, str] | None, rows_max: int
    ) -> Page[CallRow]:
        """Return the calls of a run in call order, from the one after `after` on.

        Also of a run of another user who shares its conversation, and shows them.

        Raises:
            RunNotFound: there is none for this user.
        """

    async def pending(
        self, store_id: StoreId, wanted: PendingFilter, *, after: tuple[datetime, str] | None, rows_max: int
    ) -> Page[CallRow]:
        """Return the calls that wait for someone, the oldest first, from the one after `after` on."""

    async def short_of_tokens(
        self, store_id: StoreId, wanted: PendingFilter, *, after: tuple[datetime, str] | None, rows_max: int
    ) -> Page[RunRow]:
        """Return the runs that wait for tokens, the oldest first, from the one after `after` on."""

    async def messages(
        self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId, *, after: int, rows_max: int
    ) -> MessagePage:
        """Return the messages of a conversation, from the one after number `after` on.

        Raises:
            ConversationNotFound: there is none for this user.
            ConversationErased: there was one.
        """

    async def events(self, key: RunKey, user_id: UserId, *, after_seq: int, events_max: int) -> LogPart:
        """Return events of a run after a seq: at least one if there is any, then up to the limit and 1 MiB.

        Those that were removed are a gap, and the events are those that follow it.

        Raises:
            RunNotFound: there is none for this user.
        """


class ConversationReads(Protocol):
    """Reads of conversations. What another user has and does not share is not found, as what is not there."""

    async def by_id(self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId) -> ConversationRow:
        """Return a conversation.

        Raises:
            ConversationNotFound: there is none for this user.
            ConversationErased: there was one.
        """

    async def by_key(self, key: ClientKey) -> ConversationRow:
        """Return the conversation with a key that its client has chosen.

        Raises:
            ConversationNotFound: there is none for this user.
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
        """Return conversations that people have begun, those first in which something happened last.

        From the one before `before` on, by that time and id. Of a word that stands in very many texts not all
        of them are looked at.
        """

    async def segments(self, conversation: ConversationRow) -> tuple[Segment, ...]:
        """Return where the past of a conversation stands, in order; nothing of one that is no fork."""

    async def request(self, key: RequestKey) -> RequestRow | None:
        """Return a request that has come before."""
