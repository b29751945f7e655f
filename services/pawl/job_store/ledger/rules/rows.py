"""The rows of the ledger. Where a field has a default, that is what it is in a new row.

Fields of type `bytes` are opaque: the ledger keeps what it does not judge, and
gives it back unchanged. Times are those of the database, with a time zone.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import (
    DEFAULT_AGENT,
    CallId,
    CallKey,
    ClientId,
    CommandId,
    ConversationId,
    CredentialId,
    RequestId,
    RunId,
    RunKey,
    SessionId,
    StoreId,
    UserId,
    WorkerId,
)
from pawl.job_store.ledger.rules.approval import Actor, Decision, Grant
from pawl.job_store.ledger.rules.background import NO_BACKGROUND, Background
from pawl.job_store.ledger.rules.states import AttentionReason, Sharing
from pawl.values import CallState, CommandOutcome, RunState, Series, StopCause


class ConversationKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of a conversation."""

    store_id: StoreId
    conversation_id: ConversationId


class ClientKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of a conversation as its client made it: a hash of that, unique among those of the user."""

    store_id: StoreId
    user_id: UserId
    key_hash: bytes


class CommandKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of a command: its sender made the id, and it is unique within the run."""

    store_id: StoreId
    run_id: RunId
    command_id: CommandId


class RequestKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of a request: its sender made the id, and it is unique among those of the user."""

    store_id: StoreId
    user_id: UserId
    request_id: RequestId


_IN_MOTION: Final = frozenset({RunState.RUNNING, RunState.CANCELLING})


class ConversationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One message thread. At most one of its runs has the turn; the others wait in `queue`, in order.

    `interrupting` are those of them whose message interrupted another run: they stand first, in the order in which
    they came, and each is superseded by the one behind it.
    `title` is what its user called it, `made_title` what was made of its first message, each empty for none.
    `parent_run_id` is the run whose call its run does; empty for one that people began. `parent_conversation_id` is
    where that run is.
    Of a fork, `fork_of` is the conversation that it was made of, and its messages up to `past_number` stand under
    others, as its segments say; empty and 0 for any other one.
    `model_title` is what a model has made of it, of the run `title_run_id`, empty for none and as long as none was
    asked to; `title_at` is when the next one is, None for never.
    With `shows_arguments` those who may read it, as `sharing` says, may list the calls of its runs, too.
    `erase_user_id` is whose it was if it is being erased, or was; then it is nobody's. Empty for any other.
    """

    store_id: StoreId
    conversation_id: ConversationId
    user_id: UserId
    active_run_id: RunId | None = None
    queue: tuple[RunId, ...] = ()
    last_number: int = 0
    create_time: datetime
    update_time: datetime
    interrupting: tuple[RunId, ...] = ()
    key_hash: bytes | None = None
    made_title: str = ""
    title: str = ""
    archived: bool = False
    parent_run_id: RunId = RunId("")
    parent_conversation_id: ConversationId = ConversationId("")
    fork_of: ConversationId = ConversationId("")
    past_number: int = 0
    erase_user_id: UserId = UserId("")
    labels: Mapping[str, str] = {}
    sharing: Sharing = Sharing.PRIVATE
    shows_arguments: bool = False
    model_title: str = ""
    title_at: datetime | None = None
    title_run_id: RunId = RunId("")
    background: Background = NO_BACKGROUND

    @property
    def shown_title(self) -> str:
        """That of its user, else that of a model, else the first line; empty if there is none."""
        return self.title or self.model_title or self.made_title

    @property
    def key(self) -> ConversationKey:
        """Store and conversation."""
        return ConversationKey(self.store_id, self.conversation_id)

    def is_shown_to(self, user_id: UserId) -> bool:
        """Return whether a user of its store may read it: its own, or another one while it is shared."""
        return self.user_id == user_id or (self.user_id != "" and self.sharing >= Sharing.READ)

    def takes_messages_of(self, user_id: UserId) -> bool:
        """Return whether a user of its store may write to it: its own, or another one while it is shared for that."""
        return self.user_id == user_id or (self.user_id != "" and self.sharing is Sharing.WRITE)

    def author(self, user_id: UserId) -> UserId:
        """Return what its messages say of whose they are (`MessageRow.user_id`) if they are of a user."""
        return UserId("") if self.user_id == user_id else user_id

    @property
    def notified(self) -> tuple[RunId, ...]:
        """The runs that notices of jobs are about: the active one, and the jobs; none where there is no job."""
        if self.background == NO_BACKGROUND:
            return ()
        told = (each.run_id for each in self.background.notices)
        return tuple(run_id for run_id in (self.active_run_id, *told) if run_id)

    @property
    def client_key(self) -> ClientKey | None:
        """Store, user and the hash of the key that the client has chosen; None if it chose none."""
        return None if self.key_hash is None else ClientKey(self.store_id, self.user_id, self.key_hash)

    def without(self, run_id: RunId, *, now: datetime) -> ConversationRow:
        """Return it once a run does not wait any more."""
        queue = tuple(other for other in self.queue if other != run_id)
        interrupting = tuple(other for other in self.interrupting if other in queue)
        return replace(self, queue=queue, interrupting=interrupting, update_time=now)


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the past of a fork: its messages from the first to the last number are those of another conversation.

    They have the same numbers there. An empty source was erased: nothing stands there any more.
    """

    first_number: int
    last_number: int
    source_conversation_id: ConversationId


class SegmentRow(Segment, frozen=True, kw_only=True):
    """A segment of a fork."""

    store_id: StoreId
    conversation_id: ConversationId


class LastCommit(msgspec.Struct, frozen=True, kw_only=True):
    """The last step of a run, and the answer to its owner, also to a repeat: its events, and whether commands wait."""

    commit_id: str
    epoch: int
    first_seq: int
    last_seq: int
    commands_pending: bool
    time: datetime
    shared_tokens_left: int | None = None


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """A need for an operator: the reason, and since when."""

    reason: AttentionReason
    since_time: datetime


class OwnTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that came with a run; `client_id` alone gets their calls, any client of the user if it is empty."""

    names: tuple[str, ...]
    client_id: ClientId = ClientId("")
    definitions: bytes


class RunRow(Actor, frozen=True, kw_only=True):
    """One execution on a conversation. schema.sql describes the fields.

    `claim_at` drives scheduling: None if there is nothing to do; otherwise a worker may claim the run from that time on
    (it was queued, its lease ended, its deadline came, a command arrived). `worker_id` holds the lease; None while the
    run is parked or free. `queued_message` is the first message of a run that has not had its turn yet. `crashes`
    counts the workers that died with the run since it last made progress.
    `budget_run_id` is the root of the tree that shares a token budget; empty if that is this run, or has no budget.
    `generation` counts the turns started by notices that lead to this run; 1 for such a turn itself.
    `grant` is the approval of a job's iterations.
    """

    store_id: StoreId
    run_id: RunId
    conversation_id: ConversationId
    state: RunState
    waits: tuple[int, ...] = ()
    stop_cause: StopCause | None = None
    epoch: int = 0
    worker_id: WorkerId | None = None
    claim_at: datetime | None = None
    crashes: int = 0
    attention: Attention | None = None
    last_seq: int = 0
    command_count: int = 0
    round: int = 0
    active_seconds: float = 0.0
    token_budget: int
    token_ceiling: int
    topped_up_tokens: int = 0
    budget_run_id: RunId = RunId("")
    shared_tokens_used: int = 0
    last_commit: LastCommit | None = None
    queued_message: bytes | None
    options: bytes
    tools: bytes = b""
    usage: bytes = b""
    failure: bytes = b""
    output: bytes = b""
    create_time: datetime
    start_time: datetime | None = None
    end_time: datetime | None = None
    unstopped: bytes = b""
    parent_run_id: RunId = RunId("")
    parent_call_id: CallId = CallId("")
    steers_waiting: int = 0
    steer_bytes_waiting: int = 0
    idle_receipts: int = 0
    steered_by: tuple[UserId, ...] = ()
    update_time: datetime
    progress_time: datetime | None = None
    state_time: datetime
    imported: bool = False
    own_tools: OwnTools | None = None
    agent_name: str = DEFAULT_AGENT
    labels: Mapping[str, str] = {}
    reports_to: ConversationId = ConversationId("")
    generation: int = 0
    in_background: bool = False
    silent: bool = False
    trimmed_rounds: int = 0
    trimmed_failures: int = 0
    trimmed_log_seq: int = 0
    mark_round: int = 0
    mark_seq: int = 0
    grant: Grant | None = None

    @property
    def is_turn(self) -> bool:
        """True if notices of jobs have begun it, and no message."""
        return self.generation > 0 and not self.reports_to

    @property
    def key(self) -> RunKey:
        """Store and run."""
        return RunKey(self.store_id, self.run_id)

    @property
    def shared_tokens_left(self) -> int | None:
        """Tokens left of this run's budget after all runs that share it; None without a budget."""
        return max(0, self.token_budget - self.shared_tokens_used) if self.token_budget else None

    @property
    def is_active(self) -> bool:
        """True if the run takes a place (LOOP-14): a worker has it or had it when it crashed, or it is in motion.

        A run that is parked, or waits for its turn, costs nothing.
        """
        return self.worker_id is not None or self.state in _IN_MOTION

    @property
    def is_queued(self) -> bool:
        """True if the run waits to begin: no worker has it."""
        return self.state is RunState.QUEUED and not self.is_active

    def wants_to_begin(self, now: datetime) -> bool:
        """Return whether the run waits for a place of its store; a turn never does, and a job once it is due."""
        is_due = self.claim_at is not None and self.claim_at <= now
        is_late = self.in_background and self.state is RunState.WAITING and not self.round and is_due
        return not self.is_turn and (self.is_queued or (is_late and not self.is_active))

    @property
    def is_stopping(self) -> bool:
        """True if somebody has stopped the run and it has not ended: nothing new starts (I12)."""
        return self.stop_cause is not None and not self.state.is_terminal

    @property
    def is_quarantined(self) -> bool:
        """True if no worker gets the run until an operator acts."""
        return self.attention is not None and self.attention.reason is AttentionReason.QUARANTINED


class QueueKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of a queue: what people wait for, and what goes on in the background, have places of their own."""

    store_id: StoreId
    in_background: bool


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of a store that could begin and have not, those that take one of its places, and its places, in numbers.

    See `RunRow.wants_to_begin`.
    """

    queued: int
    active: int
    places: int

    @property
    def waiting(self) -> int:
        """The number that wait for a place. A run that only waits to be claimed is no reason to refuse another one."""
        return self.queued - max(0, self.places - self.active)


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The session and the client that hold a front-end call; `client_id` is empty when nobody does."""

    client_id: ClientId
    session_id: SessionId = SessionId("")
    epoch: int
    expire_time: datetime | None
    lease_seconds: float

    def is_held(self, now: datetime) -> bool:
        """Return whether a client holds the call at `now`."""
        return self.client_id != "" and self.expire_time is not None and self.expire_time > now


class CallFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a call that the owner of its run gives.

    `digest` is empty if it was never gated. `escalated` says that its approval was waited for twice, `has_default`
    that a question has an answer for the case that nobody gives one. `child_run_id` is the run that does it, empty if
    none ever did. `series` can be granted with it, or is the one under whose grant it runs. `spec` is the rest.
    """

    call_id: CallId
    round: int
    index: int
    state: CallState
    tool_name: str
    tool_version: int
    fallback_tool_name: str
    arguments: bytes
    attempt: int
    digest: str
    deadline_time: datetime | None
    result: bytes | None
    spec: bytes
    approvals_required: int = 1
    escalated: bool = False
    has_default: bool = False
    child_run_id: RunId = RunId("")
    series: Series | None = None


class CallRow(CallFields, frozen=True, kw_only=True):
    """One tool call.

    `reserved_by` is the command that settles or decides it and that the owner of
    the run has not consumed yet; empty if none. `approvals` are those of the call as it is shown now, in order, each by
    another person with another credential; it starts only once there are `approvals_required`.
    `earlier_approvals` are those of what it was before it was edited. `progress_time` is when the log last told how
    far its client is. `state_time` is when it came into its state.
    """

    store_id: StoreId
    run_id: RunId
    conversation_id: ConversationId
    user_id: UserId
    decision: Decision | None = None
    offer: Offer | None
    reserved_by: str = ""
    create_time: datetime
    start_time: datetime | None
    end_time: datetime | None
    approvals: tuple[Decision, ...] = ()
    progress_time: datetime | None = None
    earlier_approvals: tuple[Decision, ...] = ()
    state_time: datetime

    @property
    def key(self) -> CallKey:
        """Store and call."""
        return CallKey(self.store_id, self.call_id)

    @property
    def is_leased(self) -> bool:
        """True if a client has taken the offer and not given it back."""
        return self.state is CallState.OFFERED and self.offer is not None and self.offer.client_id != ""


class MessageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a conversation. `summarised_to` is not 0 for a summary; `body` is the rest of the message.

    `user_id` is whose run it is of, if not the conversation's user; empty for that one's.
    """

    store_id: StoreId
    conversation_id: ConversationId
    number: int
    message_id: str
    run_id: RunId
    summarised_to: int
    body: bytes
    create_time: datetime
    user_id: UserId = UserId("")


class CommandRow(msgspec.Struct, frozen=True, kw_only=True):
    """A command and its receipt. An accepted one stays in the inbox of its run until it is consumed.

    `call_id` is the call that it settles or decides; empty if none. `credential_id` sent it, as
    `delegate_user_id` for the user if a delegate did; both are empty if unknown, and of the ledger's own.
    """

    store_id: StoreId
    run_id: RunId
    command_id: CommandId
    number: int
    user_id: UserId
    time: datetime
    name: str
    call_id: CallId
    fingerprint: bytes
    outcome: CommandOutcome = CommandOutcome.ACCEPTED
    reason: str = ""
    message: str = ""
    payload: bytes
    consumed: bool = False
    credential_id: CredentialId = CredentialId("")
    delegate_user_id: UserId = UserId("")

    @property
    def key(self) -> CommandKey:
        """Store, run and command."""
        return CommandKey(self.store_id, self.run_id, self.command_id)


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request that had its effect, and which run it made or entered, or which conversation it made without a run."""

    store_id: StoreId
    user_id: UserId
    request_id: RequestId
    fingerprint: bytes
    run_id: RunId
    steered: bool
    create_time: datetime
    conversation_id: ConversationId = ConversationId("")

    @property
    def key(self) -> RequestKey:
        """Store, user and request."""
        return RequestKey(self.store_id, self.user_id, self.request_id)
