"""The values between the use cases that serve clients and their ports.

`document` fields hold a thing as the contract words it. The use cases pass them
on and never look inside, so a client sees all that the ledger said, also what
this version knows nothing about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Generic, TypeVar

import msgspec

from pawl.agent_loop.domain.call import OfferLease
from pawl.agent_loop.domain.command import Cancel, Decide, Pause, Resolve, TopUp
from pawl.agent_loop.domain.options import AskedOptions
from pawl.agent_loop.domain.parts import Part
from pawl.agent_loop.domain.run import Job, OwnTools, PinnedAgent, RunAbove, RunOptions, Undo
from pawl.agent_loop.domain.tool import Tool
from pawl.chassis.auth import Principal
from pawl.chassis.ids import (
    DEFAULT_AGENT,
    CallId,
    ClientId,
    CommandId,
    ConversationId,
    CredentialId,
    RequestId,
    RunId,
    SessionId,
    UserId,
)
from pawl.errors import PawlError, by_reason
from pawl.values.call import CallState, Series
from pawl.values.command import CommandOutcome, DecisionRight
from pawl.values.run import MessagePolicy, Overlap, RunState, WaitKind

T = TypeVar("T")


class ClientSession(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of a client: it holds offers, and gives back only its own."""

    client_id: ClientId = ClientId("")
    session_id: SessionId = SessionId("")


NOBODY: Final = ClientSession()
"""In place of a session, where something comes without a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """The parts of a call that the use cases look at. Times are seconds since 1970."""

    run_id: RunId
    call_id: CallId
    tool_name: str
    tool_version: int
    state: CallState
    offer: OfferLease
    approval_digest: str
    approval_count: int
    deadline_time: float
    document: object = field(repr=False)
    answer_schema_json: bytes = b""
    """The schema of the answer to its question; empty if any will do."""
    series: Series | None = None
    """The series that can be granted with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The parts of a run that the use cases look at. `pending_calls` wait for someone."""

    run_id: RunId
    conversation_id: ConversationId
    user_id: UserId
    state: RunState
    last_seq: int
    undo: Undo | None
    pending_calls: tuple[CallView, ...]
    token_budget: int
    tokens_used: int
    document: object = field(repr=False)
    user_roles: frozenset[str] = frozenset()
    """Roles that its user had when it was started; only in runs that were read for their user or for a service."""
    credential_id: CredentialId = CredentialId("")
    """The credential that started it; as the roles."""
    delegate_user_id: UserId = UserId("")
    """The user of the delegate that started it; as the roles."""
    approvals_required: int = 0
    """People who must approve each of its gated calls; 0 means one."""
    own_tools: OwnTools | None = None
    """The tools that came with it, and whose they are; None for none."""
    brought_tools: tuple[Tool, ...] = ()
    """Those tools; only in runs that were read for a service."""
    agent_name: str = DEFAULT_AGENT
    above: tuple[RunAbove, ...] = ()
    """The runs above it."""
    reports_to_conversation_id: ConversationId = ConversationId("")
    """Of a job, the conversation that is told what it comes to; empty of every other run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvent:
    """One entry of a run's log. Equal seq, equal document: all watchers share it."""

    seq: int
    size_bytes: int
    run_state: RunState | None
    """The state that the run changed to with this event."""
    call: CallView | None
    """The call that changed with this event."""
    document: object = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogGap:
    """The place of the events up to `to_seq`, which are not kept any more."""

    to_seq: int
    document: object = field(repr=False)


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a run's log: perhaps a gap, then events without gaps among them.

    `ended`: nothing comes after `last_seq`.
    """

    events: tuple[LoggedEvent, ...]
    last_seq: int
    ended: bool
    gap: LogGap | None = None


class PageAsked(msgspec.Struct, frozen=True, kw_only=True):
    """The page of a list that is asked for: how much (0 leaves that to the ledger), and the token of the one before."""

    page_size: int
    page_token: str


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A page of a list; the token is empty after the last."""

    items: tuple[T, ...]
    next_page_token: str


class ErasureView(msgspec.Struct, frozen=True, kw_only=True):
    """The receipt of an erasure, and a page of what has left; documents are as the contract has them."""

    erasure: object
    left: Page[object]


class NewMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a user, checked, with options complete; `asked_options` is what the user said of them.

    `conversation_key` names the conversation in place of its id, and makes it if there is none.
    With `undo` the run that it starts takes another one back. `asked_agent` is the agent that the user named and
    `agent` the version that the options come from; None if there is no such agent, or none was named. `brought` are
    the tools that come with the run; None for none.
    """

    request_id: RequestId
    conversation_id: ConversationId
    conversation_must_exist: bool
    text: str
    asked_options: AskedOptions
    options: RunOptions
    policy: MessagePolicy
    undo: Undo | None = None
    conversation_key: str = ""
    asked_agent: str = ""
    agent: PinnedAgent | None = None
    parts: tuple[Part, ...] = ()
    """The whole message, its texts too, if it has more than a text: then `text` is empty."""
    brought: BroughtTools | None = None
    only_repeat: bool = False
    """True if nothing may come of it: a run that the same request has started before is given, else ToolExists."""
    labels: Mapping[str, str] = {}


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the ledger takes it. `message` says whose it is, to which conversation it reports and how it is driven.

    That conversation has the id `new_conversation_id` if the message names none. `asked_sha256` is the digest of what
    the user asked for. With `message.only_repeat` nothing may come of it, as there.
    """

    message: NewMessage
    run_id: RunId
    new_conversation_id: ConversationId
    job: Job
    asked_sha256: bytes


class ScheduledMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message with which the runs of a schedule begin, their agent and labels, and the key of one conversation."""

    text: str
    agent: str
    labels: Mapping[str, str]
    conversation_key: str


class DueSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that is to be fired: whose it is, what its runs are told, and the rest as the ledger has it.

    `expected_time` is the due time, None of one that is fired by hand. An empty `time_zone` is UTC.
    """

    caller: Principal
    message: ScheduledMessage
    document: object
    name: str = ""
    time_zone: str = ""
    expected_time: datetime | None = None


class DueTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger that is to be fired: whose it is, what its runs are told, how events go together, and the whole of it.

    The text of the message is a template.
    """

    caller: Principal
    message: ScheduledMessage
    trigger_id: str
    name: str
    conversation_pointer: str
    concurrency_pointer: str
    debounce_seconds: int
    overlap: Overlap
    mailbox: object
    """As the contract has it; None for none."""
    folder_id: str
    """The folder of the mailbox, by which its mails differ from those of others; empty without one."""
    document: object


class TriggerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event: those of a lane wait for each other. `data` is what its run is told of it."""

    event_id: str
    lane: str | None
    data: bytes
    conversation_key: str


class MailPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A mail by its UID, or a place behind it."""

    uid_validity: int
    uid: int


class DueMailbox(msgspec.Struct, frozen=True, kw_only=True):
    """A mailbox that is to be read after a place, and the trigger whose it is."""

    trigger: DueTrigger
    place: MailPlace


class IncomingMail(msgspec.Struct, frozen=True, kw_only=True):
    """A mail: its data as JSON, and why it fires nothing, if so."""

    uid: int
    refusal: str
    data_json: bytes


class MailboxView(msgspec.Struct, frozen=True, kw_only=True):
    """The mails that were read, and the last one that is there, or was."""

    place: MailPlace
    mails: tuple[IncomingMail, ...] = ()
    has_more: bool = False


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """The fire of an event, as the contract has it; None if the trigger has changed. `duplicate` if it came before."""

    fire: object | None
    duplicate: bool


class BroughtTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that come with a run; the client that alone gets their calls, any of the user if it is empty.

    `asked_sha256` is the digest of what the user gave.
    """

    tools: tuple[Tool, ...]
    client_id: ClientId
    asked_sha256: bytes


class LeaseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a session that asked for a call: whether it now holds it, and the call if there is one.

    `replaced` if a newer session of the same client holds it.
    """

    granted: bool
    call: CallView | None
    replaced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultCommand:
    """A result of a front-end call. Without a stream there is no client and no lease.

    `session_id` is the stream that leased the call; empty where the client sends a
    result again that it has of an earlier one.
    """

    call_id: CallId
    content_json: bytes
    is_error: bool
    client_id: ClientId = ClientId("")
    offer_epoch: int = 0
    session_id: SessionId = field(default=SessionId(""), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressCommand:
    """Progress of a front-end call; `session_id` as in a result."""

    call_id: CallId
    client_id: ClientId
    offer_epoch: int
    fraction: float | None
    message: str
    session_id: SessionId = field(default=SessionId(""), compare=False)


class DecisionCommand(Decide, frozen=True, kw_only=True):
    """A decision, of somebody with `right`; `arguments_json`, `edited_digest` and `edited_preview` go with EDIT."""

    digest: str
    right: DecisionRight = DecisionRight.OWN_RUNS


class PendingFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The part of all that waits: the caller's own, or with `of_store` all of the store that approvers may see.

    Empty fields leave all; states and a tool's name leave no run.
    """

    of_store: bool = False
    states: tuple[CallState, ...] = ()
    tool_name: str = ""
    conversation_id: ConversationId = ConversationId("")


class RunFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a user's runs that is listed, and its order: by when they were created, the newest first.

    Times are seconds since 1970.
    """

    conversation_id: ConversationId = ConversationId("")
    states: tuple[RunState, ...] = ()
    oldest_first: bool = False
    create_time_from: float | None = None
    create_time_before: float | None = None
    waits: tuple[WaitKind, ...] = ()
    """The kinds of which a run waits for one; empty for all."""
    parent_run_id: RunId = RunId("")
    agent_name: str = ""
    labels: Mapping[str, str] = {}
    jobs_only: bool = False
    running_jobs_of_store: bool = False
    """True for the jobs of all users of the store that nobody has stopped: then it says nothing but the next one."""
    stopped_by_command_id: CommandId = CommandId("")
    """The command whose jobs are wanted, too, if it has stopped them; of a conversation none that another one has."""
    reports_to_conversation_id: ConversationId = ConversationId("")


class RedriveCommand(msgspec.Struct, frozen=True, kw_only=True):
    """An operator lets a quarantined run go on."""

    reason: str


PublicCommand = ResultCommand | ProgressCommand | DecisionCommand | Cancel | Resolve | RedriveCommand | TopUp | Pause


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of the ledger to a command: the outcome, and the run after it unless UNKNOWN."""

    outcome: CommandOutcome
    reason: str = ""
    message: str = ""
    run: RunView | None = None

    @property
    def taken(self) -> bool:
        """True if the command is in effect, now or since before."""
        return self.outcome in {CommandOutcome.ACCEPTED, CommandOutcome.DUPLICATE}

    def run_after(self, default: type[PawlError], *, also_late: bool = False) -> RunView:
        """Return the run after a command that was taken, or with `also_late` after any.

        Raises:
            PawlError: the one that the outcome names; `default` if it names none.
        """
        if self.run is not None and (self.taken or also_late):
            return self.run
        raise by_reason.get(self.reason, default)(self.message)


class EditVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The registry's verdict on edited arguments: canonical, with their digest."""

    arguments_json: bytes
    digest: str
    preview: str = ""
    series_digest: str = ""
    """The digest by which the series can be granted with them; empty if it cannot."""
