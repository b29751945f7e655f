"""A run as the ledger has it. Names and meanings are those of pawl.event.v1."""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec import field

from pawl.agent_loop.loop.rules.call import Decided
from pawl.agent_loop.loop.rules.condition import Condition
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.chassis.ids import DEFAULT_AGENT, CallId, ClientId, ConversationId, CredentialId, RunId, StoreId, UserId
from pawl.values import JobReports, RunState, Series, StopCause, Usage, WaitKind


class RoundLimitPolicy(StrEnum):
    """The policy after the last allowed round."""

    FINAL_ANSWER = "FINAL_ANSWER"
    FAIL = "FAIL"


class BatchOrder(StrEnum):
    """The policy for a serial call behind earlier calls that wait for a person: to wait for them or not."""

    WAIT_FOR_DECISIONS = "WAIT_FOR_DECISIONS"
    OVERTAKE_DECISIONS = "OVERTAKE_DECISIONS"


class UnknownOutcomePolicy(StrEnum):
    """The policy for a call of which it cannot be known whether its effect happened."""

    TELL_MODEL = "TELL_MODEL"
    NEEDS_ATTENTION = "NEEDS_ATTENTION"


class TokenBudgetPolicy(StrEnum):
    """The policy when the token budget is used up."""

    WAIT = "WAIT"
    FAIL = "FAIL"


class ApprovalExpiryPolicy(StrEnum):
    """The policy when nobody decides a gated call in time."""

    DENY = "DENY"
    ESCALATE = "ESCALATE"


class ToolChoiceMode(StrEnum):
    """The constraint on the first model call."""

    AUTO = "AUTO"
    NONE = "NONE"
    REQUIRED = "REQUIRED"
    TOOL = "TOOL"


class ReasoningEffort(StrEnum):
    """The thinking of a model before it answers; the value is the model server's word."""

    NONE = "none"
    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    XHIGH = "xhigh"
    MAX = "max"


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an answer that is JSON; `strict` asks the model server to hold the model to the schema."""

    name: str = ""
    schema_json: bytes = b""
    strict: bool = False


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The constraint on the first model call; `tool_name` goes with TOOL."""

    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    tool_name: str = ""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options that are kept as they are asked for: all but the limits."""

    model: str = ""
    instructions: str = ""
    tool_names: tuple[str, ...] = ()
    without_tools: bool = False
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    round_limit_policy: RoundLimitPolicy = RoundLimitPolicy.FINAL_ANSWER
    batch_order: BatchOrder = BatchOrder.WAIT_FOR_DECISIONS
    unknown_outcome_policy: UnknownOutcomePolicy = UnknownOutcomePolicy.TELL_MODEL
    token_budget_policy: TokenBudgetPolicy = TokenBudgetPolicy.WAIT
    approval_expiry_policy: ApprovalExpiryPolicy = ApprovalExpiryPolicy.DENY
    approvals_required: int = 0
    temperature: float | None = None
    output_tokens_max: int | None = None
    response_format: ResponseFormat | None = None
    """The form of the answer; None for text."""
    reasoning_effort: ReasoningEffort | None = None
    """None leaves it to the model server."""
    model_fallbacks: tuple[str, ...] = ()
    without_background: bool = False


class RunOptions(Options, frozen=True, kw_only=True):
    """The options of a run; fixed when it is created."""

    limits: Limits = field(default_factory=Limits)


class FailureClass(StrEnum):
    """The group of a failure, for clients to branch on."""

    AUTH = "AUTH"
    RATE = "RATE"
    PROVIDER = "PROVIDER"
    CONTENT_FILTER = "CONTENT_FILTER"
    LIMIT = "LIMIT"
    STUCK = "STUCK"
    INTERNAL = "INTERNAL"
    TOOL = "TOOL"


class RunFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a run FAILED: the group, the reason for programs, a sentence for the user."""

    failure_class: FailureClass
    reason: str
    message: str


class PinnedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool version that a run uses from its start to its end."""

    name: str
    version: int
    definition_sha256: str = ""
    """The digest of its definition, of a tool that came with the run; empty for one of the register."""


class OwnTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that came with a run; the client that alone gets their calls, any of the user if it is empty."""

    names: tuple[str, ...] = ()
    client_id: ClientId = ClientId("")


class PinnedAgent(msgspec.Struct, frozen=True, kw_only=True):
    """The version of an agent with which a run was started."""

    name: str
    version: int
    gives_tools: bool = False
    """True if the names of the tools of the run are its: those that the user may not call are left out."""


class Monitor(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that a job tells of each time it becomes so; see pawl.event.v1.JobMonitor."""

    condition: Condition
    pause_seconds: float = 0.0
    firings_max: int
    hold_seconds: float = 0.0


class JobTerms(msgspec.Struct, frozen=True, kw_only=True):
    """How a call is made in the background; see pawl.event.v1.Job for what each field means."""

    interval_seconds: float = 0.0
    iterations_max: int = 1
    delay_first: bool = False
    estimated_minutes: float = 0.0
    until: Condition | None = None
    """The result with which it ends before its time; None for any."""
    when: Monitor | None = None
    """The result that is told each time it becomes so; None for none."""
    report_iterations: int = 0
    report_seconds: float = 0.0
    failures_told: int = 0
    """0 for as many as are usual."""


class Job(JobTerms, frozen=True, kw_only=True):
    """A call in the background, once or again and again; see pawl.event.v1.Job for what each field means."""

    tool_name: str
    arguments_json: bytes
    begin_time: float
    end_time: float | None = None
    timeout_seconds: float = 0.0
    reports: JobReports = JobReports.EVERY
    delegates: bool = False


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The approval of the iterations of a job, given with a call; one that has `ended` covers nothing any more."""

    series: Series
    call_id: CallId
    approvals: tuple[Decided, ...] = ()
    ended: bool = False

    def covers(self, approvals_required: int) -> bool:
        """Return whether iterations may begin under it, where so many people must approve a gated call by now."""
        return not self.ended and len({each.user_id for each in self.approvals}) >= max(1, approvals_required)


class Undo(msgspec.Struct, frozen=True, kw_only=True):
    """The order to take back the calls of a run, or the one named; `user_id` asked for it."""

    run_id: RunId
    call_id: CallId = CallId("")
    user_id: UserId = UserId("")


class RunAbove(msgspec.Struct, frozen=True, kw_only=True):
    """A run that stands above another one, its conversation and its agent, which is empty if it is not known."""

    run_id: RunId
    conversation_id: ConversationId
    agent_name: str = ""


class Delegation(msgspec.Struct, frozen=True, kw_only=True):
    """A run to be created: its first message, how it is driven, and the runs above it, the parent last."""

    call_id: CallId
    run_id: RunId
    text: str
    options: RunOptions
    above: tuple[RunAbove, ...]
    depth: int
    """The number of delegations above it: a job is as deep as the run that starts it."""
    user_roles: tuple[str, ...] = ()
    agent: PinnedAgent | None = None
    """The agent that drives it; None for the `default` of the deployment."""
    job: Job | None = None
    """The call in the background, where it is DETACHED; None where the caller waits for it."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One execution on a conversation; with `undo` it takes another one back and calls no model for that."""

    store_id: StoreId
    user_id: UserId
    conversation_id: ConversationId
    run_id: RunId
    state: RunState = RunState.QUEUED
    waits: tuple[WaitKind, ...] = ()
    options: RunOptions = field(default_factory=RunOptions)
    budget_run_id: RunId = RunId("")
    """The root run whose token budget also counts this run's tokens; empty for none."""
    tools: tuple[PinnedTool, ...] = ()
    round: int = 0
    last_seq: int = 0
    usage: Usage = field(default_factory=Usage)
    tokens_needed: int = 0
    """The tokens that a top-up must add at the least, while the run waits for one."""
    failure: RunFailure | None = None
    stop_cause: StopCause | None = None
    output_text: str = ""
    missed_iterations: int = 0
    """Of a series: the due times until the end of its last iteration for which there was none."""
    active_seconds: float = 0.0
    unstopped_call_ids: tuple[CallId, ...] = ()
    user_roles: tuple[str, ...] = ()
    """Roles of the user when the run was started."""
    undo: Undo | None = None
    parent_run_id: RunId = RunId("")
    """The run whose call this one does; empty unless it does one."""
    parent_call_id: CallId = CallId("")
    depth: int = 0
    """The number of delegations above it."""
    above: tuple[RunAbove, ...] = ()
    """The runs above it, through jobs too, the parent last: rules that restrict them restrict it."""
    credential_id: CredentialId = CredentialId("")
    """The credential that started it, or the run above it; empty if it is not known."""
    delegate_user_id: UserId = UserId("")
    """The user of the delegate that started it for its user; empty for none."""
    agent: PinnedAgent | None = None
    """The agent that it was started with; None for the `default` of the deployment."""
    output_json: bytes = b""
    """The last answer as JSON, if it is what the response format asks for; empty otherwise."""
    own_tools: OwnTools | None = None
    """The tools that came with it; None for none."""
    job: Job | None = None
    """The call that it makes in the background; None unless it is a job."""
    reports_to_conversation_id: ConversationId = ConversationId("")
    """The conversation that a job reports to."""
    generation: int = 0
    """The number of turns, begun by notices of jobs and by no message, that lead to it."""
    grant: Grant | None = None
    """The approval of the iterations of a job; None if there never was one."""

    @property
    def is_job(self) -> bool:
        """True if it makes a call in the background."""
        return self.job is not None and bool(self.reports_to_conversation_id)

    @property
    def acts_for_conversation_id(self) -> ConversationId:
        """The conversation whose rules hold: for a job the one that it reports to."""
        return self.reports_to_conversation_id or self.conversation_id

    @property
    def chain(self) -> tuple[RunAbove, ...]:
        """The runs above a run that this one starts."""
        own = RunAbove(run_id=self.run_id, conversation_id=self.acts_for_conversation_id, agent_name=self.agent_name)
        return (*self.above, own)

    @property
    def is_turn(self) -> bool:
        """True if notices of jobs have begun it, and no message."""
        return self.generation > 0 and not self.reports_to_conversation_id

    @property
    def series(self) -> Series | None:
        """The iterations of a job, with the grant that covers them if one does by now; None for any other run."""
        job, grant = self.job, self.grant
        if job is None or not self.is_job or not job.interval_seconds:
            return None
        is_granted = grant is not None and grant.covers(self.options.approvals_required)
        return Series(
            digest=grant.series.digest if grant is not None and is_granted else "",
            interval_seconds=job.interval_seconds,
            iterations_max=job.iterations_max,
            end_time=job.end_time,
            grant_call_id=grant.call_id if grant is not None and is_granted else CallId(""),
        )

    def definition_sha256(self, name: str) -> str:
        """Return the digest of a tool that came with the run; empty for any other."""
        return next((tool.definition_sha256 for tool in self.tools if tool.name == name), "")

    @property
    def agent_name(self) -> str:
        """The name of its agent, also where that is the `default` of the deployment."""
        return self.agent.name if self.agent else DEFAULT_AGENT

    def tool_version(self, name: str) -> int:
        """Return the pinned version of a tool, 0 if the run has no such tool."""
        return next((tool.version for tool in self.tools if tool.name == name), 0)


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """The word of a job to its conversation, of an iteration or with `occasion` 0 of its end: how its run is now."""

    run: Run
    occasion: int
