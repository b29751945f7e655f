"""The rows of the ledger.

A field's default is its value in a new row. Fields of type `bytes` are opaque to the ledger, which stores and returns
them unchanged. Times come from the database and have a time zone.
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
from pawl.job_store.ledger.rules.states import AttentionReason, RunProgram, Sharing
from pawl.values import CallState, CommandOutcome, RunState, Series, StopCause


class ConversationKey(msgspec.Struct, frozen=True, order=True, gc=False):
    store_id: StoreId
    conversation_id: ConversationId


class ClientKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The hash of a conversation key that a client has chosen. Unique per user."""

    store_id: StoreId
    user_id: UserId
    key_hash: bytes


class CommandKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of a command. The sender chooses the id, which is unique within the run."""

    store_id: StoreId
    run_id: RunId
    command_id: CommandId


class RequestKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of a request. The sender chooses the id, which is unique per user."""

    store_id: StoreId
    user_id: UserId
    request_id: RequestId


# No round number is higher.
_NO_ROUND: Final = 2**31 - 1
_IN_MOTION: Final = frozenset({RunState.RUNNING, RunState.CANCELLING})


class ConversationRow(msgspec.Struct, frozen=True, kw_only=True):
    """A message thread.

    At most one of its runs is active. The others wait in `queue`, in order.

    `interrupting` lists the queued runs whose message interrupted another run. They are at the front of the queue, in
    order of arrival. Each is superseded by the next.

    `title` comes from the user, `made_title` from the first message, and `model_title` from a model. Each may be empty.
    The model makes a title from the run `title_run_id`. `title_at` is when a title is requested next, or None.

    `parent_run_id` is the run that delegated a call to this conversation, and `parent_conversation_id` is that run's
    conversation. Both are empty for conversations that users started.

    `fork_of` is the source of a fork. Messages up to `past_number` belong to other conversations: see its segments.

    `shows_arguments` also lets readers (see `sharing`) list the calls of the conversation's runs. If the conversation
    is being or was erased, `erase_user_id` is its former user, and `user_id` is empty.
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
        """The user's title, else the model's title, else the first line of the conversation. May be empty."""
        return self.title or self.model_title or self.made_title

    @property
    def key(self) -> ConversationKey:
        return ConversationKey(self.store_id, self.conversation_id)

    def is_shown_to(self, user_id: UserId) -> bool:
        """Return whether a user of the store may read the conversation.

        The owner always may. Other users may while it is shared.
        """
        return self.user_id == user_id or (self.user_id != "" and self.sharing >= Sharing.READ)

    def takes_messages_of(self, user_id: UserId) -> bool:
        """Return whether a user of the store may write to the conversation.

        The owner always may. Other users may while sharing allows writing.
        """
        return self.user_id == user_id or (self.user_id != "" and self.sharing is Sharing.WRITE)

    def author(self, user_id: UserId) -> UserId:
        """Return the `MessageRow.user_id` of this user's messages, which is empty for the owner."""
        return UserId("") if self.user_id == user_id else user_id

    @property
    def notified(self) -> tuple[RunId, ...]:
        """Runs to notify: the active run, jobs with notices, and delegated jobs with the runs that they report to."""
        if self.background == NO_BACKGROUND:
            return ()
        notices, open_jobs = self.background.notices, self.background.open_jobs
        above = (run_id for each in (*notices, *open_jobs) for run_id in each.above)
        delegated = (each.run_id for each in open_jobs if each.receiver)
        notified = (self.active_run_id, *(each.run_id for each in notices), *above, *delegated)
        return tuple(dict.fromkeys(run_id for run_id in notified if run_id))

    @property
    def client_key(self) -> ClientKey | None:
        """The conversation's `ClientKey`, or None if no client has chosen a key."""
        return None if self.key_hash is None else ClientKey(self.store_id, self.user_id, self.key_hash)

    def without(self, run_id: RunId, *, now: datetime) -> ConversationRow:
        queue = tuple(other for other in self.queue if other != run_id)
        interrupting = tuple(other for other in self.interrupting if other in queue)
        return replace(self, queue=queue, interrupting=interrupting, update_time=now)


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a fork's past: a range of messages that belong to another conversation.

    The messages have the same numbers in both conversations. If the source is empty, the other conversation was erased,
    and its messages no longer exist.
    """

    first_number: int
    last_number: int
    source_conversation_id: ConversationId


class SegmentRow(Segment, frozen=True, kw_only=True):
    store_id: StoreId
    conversation_id: ConversationId


class LastCommit(msgspec.Struct, frozen=True, kw_only=True):
    """The last step of a run, and the response to it, which is repeated if the owner sends the step again."""

    commit_id: str
    epoch: int
    first_seq: int
    last_seq: int
    commands_pending: bool
    time: datetime
    shared_tokens_left: int | None = None


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    reason: AttentionReason
    since_time: datetime


class OwnTools(msgspec.Struct, frozen=True, kw_only=True):
    """Tools that a client supplied with a run.

    Only the client `client_id` can lease calls to these tools. If `client_id` is empty, any of the user's clients can.
    """

    names: tuple[str, ...]
    client_id: ClientId = ClientId("")
    definitions: bytes


class RunRow(Actor, frozen=True, kw_only=True):
    """One execution in a conversation. schema.sql describes the fields.

    `claim_at` drives scheduling. It is None if there is nothing to do. Otherwise, it is the time from which a worker
    may claim the run because it was queued, its lease expired, its deadline passed, or a command arrived. `worker_id`
    is the worker that holds the lease, or None while the run is parked or free. `queued_message` is the first message
    of a run that has not been active yet. `crashes` counts the workers that have crashed on the run since it last made
    progress.

    `budget_run_id` is the root of the tree of runs that share a token budget. It is empty if this run is the root or
    has no budget. `generation` counts the turns that led to this run, including the run itself if it is a turn. `grant`
    is the approval of a series of a job's calls.

    `root_conversation_id` is set for delegated runs. It is the conversation that people read and to which the jobs
    below this run report. `agents_above` lists the runs above this run that are not jobs, nearest first. The last is
    the root run, which may be a job.
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
    root_conversation_id: ConversationId = ConversationId("")
    agents_above: tuple[RunId, ...] = ()
    trimmed_rounds: int = 0
    trimmed_failures: int = 0
    trimmed_log_seq: int = 0
    mark_round: int = 0
    mark_seq: int = 0
    grant: Grant | None = None
    program: RunProgram = RunProgram.DEFAULT
    trace: str = ""

    @property
    def is_turn(self) -> bool:
        """True if job notices, and not a message, started the run."""
        return self.generation > 0 and not self.reports_to

    @property
    def loaded_from_round(self) -> int:
        """The first round whose settled calls a worker loads. For jobs and goals, this is the last round."""
        if self.program is RunProgram.WORKFLOW:
            return _NO_ROUND
        return self.round if self.reports_to or self.program is RunProgram.GOAL else 0

    @property
    def jobs_conversation_id(self) -> ConversationId:
        """The conversation to which the jobs of this run report."""
        return self.root_conversation_id or self.reports_to or self.conversation_id

    @property
    def agents_down_to(self) -> tuple[RunId, ...]:
        """The `agents_above` of the runs that this run starts."""
        is_job_below = self.reports_to and self.agents_above
        return self.agents_above if is_job_below else (self.run_id, *self.agents_above)

    @property
    def receives_as(self) -> RunId:
        """The run's id if the run is delegated, otherwise an empty id. See `Notice.receiver`."""
        return self.run_id if self.root_conversation_id else RunId("")

    @property
    def key(self) -> RunKey:
        return RunKey(self.store_id, self.run_id)

    @property
    def shared_tokens_left(self) -> int | None:
        """Tokens left in the budget of which this run is the root, or None if it has no such budget."""
        return max(0, self.token_budget - self.shared_tokens_used) if self.token_budget else None

    @property
    def is_active(self) -> bool:
        """True if the run uses a slot (LOOP-14): it has a worker, or it is RUNNING or CANCELLING."""
        return self.worker_id is not None or self.state in _IN_MOTION

    @property
    def is_queued(self) -> bool:
        """True if the run is QUEUED and has no worker."""
        return self.state is RunState.QUEUED and not self.is_active

    def needs_slot(self, now: datetime) -> bool:
        """Return whether the run is waiting for a slot, as queued runs and due jobs do. Turns never wait for one."""
        is_due = self.claim_at is not None and self.claim_at <= now
        is_late = self.in_background and self.state is RunState.WAITING and not self.round and is_due
        return not self.is_turn and (self.is_queued or (is_late and not self.is_active))

    @property
    def is_stopping(self) -> bool:
        """True if the run is being stopped but has not ended. Nothing new starts in it (I12)."""
        return self.stop_cause is not None and not self.state.is_terminal

    @property
    def is_quarantined(self) -> bool:
        """True if workers may not claim the run until an operator acts."""
        return self.attention is not None and self.attention.reason is AttentionReason.QUARANTINED


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The client and session that hold a front-end call. If no client holds it, `client_id` is empty."""

    client_id: ClientId
    session_id: SessionId = SessionId("")
    epoch: int
    expire_time: datetime | None
    lease_seconds: float

    def is_held(self, now: datetime) -> bool:
        return self.client_id != "" and self.expire_time is not None and self.expire_time > now


class CallFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a call that the owner of its run sets.

    `digest` is empty if the call was never gated. `escalated` means that approval was requested a second time.
    `has_default` means that the question has a default answer. `child_run_id` is the run that executes the call. It is
    empty if no run ever did. `asked_user_id` is the only user who may decide on or answer the call. If it is empty,
    only approvers may. If it is None, the usual rules apply. `series` is the series that an approval can grant, or
    under whose grant the call runs. `spec` contains all other fields, which are opaque here.
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
    asked_user_id: UserId | None = None


class CallRow(CallFields, frozen=True, kw_only=True):
    """One tool call.

    `reserved_by` is the command that settles or decides on the call, as long as the run's owner has not consumed it.
    `approvals`, in order, are for the call as currently shown. If several are required, each comes from a different
    person with a different credential. The call starts only with `approvals_required` approvals. `earlier_approvals`
    were given before the call was edited. `progress_time` is when the call's progress was last logged, and `state_time`
    is when the call entered its state.
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
        return CallKey(self.store_id, self.call_id)

    @property
    def asks_another(self) -> bool:
        return bool(self.asked_user_id) and self.asked_user_id != self.user_id

    @property
    def is_leased(self) -> bool:
        return self.state is CallState.OFFERED and self.offer is not None and self.offer.client_id != ""


class MessageRow(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a conversation.

    `summarised_to` is positive for a summary. `body` holds the fields that are opaque to the ledger.

    `user_id` is the user of the message's run if that is not the conversation's user. Otherwise, it is empty.
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
    """A command and its receipt.

    An accepted command stays in the inbox of its run until it is consumed.

    `call_id` is the call, if any, that the command settles or decides on. `credential_id` is the sender's credential,
    and `delegate_user_id` is the delegate that acted for the sender. Both are empty if unknown, or if the ledger sent
    the command.
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
        return CommandKey(self.store_id, self.run_id, self.command_id)


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """A completed request, with the run that it created or entered, or with its conversation."""

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
        return RequestKey(self.store_id, self.user_id, self.request_id)
