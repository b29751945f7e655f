"""Runs in the ledger. Names and meanings follow pawl.event.v1."""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec import field

from pawl.agent_loop.loop.rules.call import UserDecision
from pawl.agent_loop.loop.rules.condition import Condition
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.chassis.ids import DEFAULT_AGENT, CallId, ClientId, ConversationId, CredentialId, RunId, StoreId, UserId
from pawl.values import JobReports, RunState, Series, StopCause, Usage, WaitKind


class RoundLimitPolicy(StrEnum):
    FINAL_ANSWER = "FINAL_ANSWER"
    FAIL = "FAIL"


class BatchOrder(StrEnum):
    """The order of a batch's calls. It determines whether a call waits for earlier calls that await a decision."""

    WAIT_FOR_DECISIONS = "WAIT_FOR_DECISIONS"
    OVERTAKE_DECISIONS = "OVERTAKE_DECISIONS"


class UnknownOutcomePolicy(StrEnum):
    TELL_MODEL = "TELL_MODEL"
    NEEDS_ATTENTION = "NEEDS_ATTENTION"


class TokenBudgetPolicy(StrEnum):
    WAIT = "WAIT"
    FAIL = "FAIL"


class ApprovalExpiryPolicy(StrEnum):
    DENY = "DENY"
    ESCALATE = "ESCALATE"


class ToolChoiceMode(StrEnum):
    AUTO = "AUTO"
    NONE = "NONE"
    REQUIRED = "REQUIRED"
    TOOL = "TOOL"


class ReasoningEffort(StrEnum):
    NONE = "none"
    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    XHIGH = "xhigh"
    MAX = "max"


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON response format. `strict` asks the model server to enforce the schema."""

    name: str = ""
    schema_json: bytes = b""
    strict: bool = False


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the first model call's use of tools. If the mode is TOOL, `tool_name` must be set."""

    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    tool_name: str = ""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """A run's options except its limits."""

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
    # None means text.
    response_format: ResponseFormat | None = None
    # None leaves it to the model server.
    reasoning_effort: ReasoningEffort | None = None
    model_fallbacks: tuple[str, ...] = ()
    without_background: bool = False
    without_guidelines: bool = False


class RunOptions(Options, frozen=True, kw_only=True):
    """A run's options, fixed when the run is created."""

    limits: Limits = field(default_factory=Limits)


class FailureClass(StrEnum):
    """The class of a run's failure. Clients can branch on it."""

    AUTH = "AUTH"
    RATE = "RATE"
    PROVIDER = "PROVIDER"
    CONTENT_FILTER = "CONTENT_FILTER"
    LIMIT = "LIMIT"
    STUCK = "STUCK"
    INTERNAL = "INTERNAL"
    TOOL = "TOOL"


class RunFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of a run's failure: its class, a machine-readable reason, and a sentence for the user."""

    failure_class: FailureClass
    reason: str
    message: str


def limit_failure(reason: str, message: str) -> RunFailure:
    return RunFailure(failure_class=FailureClass.LIMIT, reason=reason, message=message)


class PinnedTool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: int
    # Digest of a client-supplied definition; empty for registered tools.
    definition_sha256: str = ""


class OwnTools(msgspec.Struct, frozen=True, kw_only=True):
    """Tools that a client supplied with the run.

    Only the client `client_id` can lease calls of these tools or, if `client_id` is empty, any of the user's clients.
    """

    names: tuple[str, ...] = ()
    client_id: ClientId = ClientId("")


class PinnedAgent(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: int
    # True if the agent selects the run's tools; those that the user may not call are omitted.
    gives_tools: bool = False


class Monitor(msgspec.Struct, frozen=True, kw_only=True):
    """A condition that a job reports each time it becomes true. See pawl.event.v1.JobMonitor."""

    condition: Condition
    pause_seconds: float = 0.0
    firings_max: int
    hold_seconds: float = 0.0


class JobTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Terms on which a call runs in the background. See pawl.event.v1.Job for the fields."""

    interval_seconds: float = 0.0
    iterations_max: int = 1
    delay_first: bool = False
    estimated_minutes: float = 0.0
    # The condition that ends the job early.
    until: Condition | None = None
    # The condition that is reported each time it becomes true.
    when: Monitor | None = None
    report_iterations: int = 0
    report_seconds: float = 0.0
    report_percents: tuple[int, ...] = ()
    # 0 means the default.
    failures_told: int = 0


class Job(JobTerms, frozen=True, kw_only=True):
    """A background call, made once or repeatedly. See pawl.event.v1.Job for the fields."""

    tool_name: str
    arguments_json: bytes
    begin_time: float
    end_time: float | None = None
    timeout_seconds: float = 0.0
    reports: JobReports = JobReports.EVERY
    delegates: bool = False


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a job's call, which started at `start_time`. `fraction` is between 0 and 1, or None if unknown."""

    fraction: float | None = None
    message: str = ""
    time: float
    start_time: float


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The approval of a job's iterations, given with a call. It covers no further iterations once `ended` is set."""

    series: Series
    call_id: CallId
    approvals: tuple[UserDecision, ...] = ()
    ended: bool = False

    def covers(self, approvals_required: int) -> bool:
        """Return whether iterations may start under this grant, given the current approval minimum."""
        return not self.ended and len({each.user_id for each in self.approvals}) >= max(1, approvals_required)


class Undo(msgspec.Struct, frozen=True, kw_only=True):
    """A request by `user_id` to undo a run's calls. If `call_id` is set, only this call is undone."""

    run_id: RunId
    call_id: CallId = CallId("")
    user_id: UserId = UserId("")


class MapChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive items of the map `node`, starting at `first_index`.

    Up to `failures_max` of them may fail, and up to `concurrency` may be open. `scope_state` is a cursor with the nodes
    of the map's run that the map's expressions use.
    """

    node: str
    first_index: int
    items_json: bytes
    scope_state: bytes = b""
    failures_max: int = 0
    concurrency: int = 1


class PinnedWorkflow(msgspec.Struct, frozen=True, kw_only=True):
    """The workflow version that a run executes, and its input. `input_json` is canonical JSON."""

    name: str
    version: int
    input_json: bytes = b"{}"
    # The conversation that gets a notice of its end; empty if there is none.
    reports_to_conversation_id: ConversationId = ConversationId("")
    # The run whose finished nodes it reuses, and the node from which to run again; empty if it reuses none.
    rerun_of_run_id: RunId = RunId("")
    rerun_node: str = ""
    # The items that the run processes for another run's map; None for other runs.
    chunk: MapChunk | None = None
    # The cursor at its start, with the finished nodes that it reuses; empty for most runs.
    start_state: bytes = b""
    # Set by the ledger.
    token_key: bytes = b""


class GoalAgent(msgspec.Struct, frozen=True, kw_only=True):
    """The agent that makes a goal's attempts, with extra instructions. The goal run itself has the same agent.

    Attempts may use the tools in `tool_names` or, if that is empty, all of the agent's tools.
    """

    agent: str = ""
    instructions: str = ""
    tool_names: tuple[str, ...] = ()


class GoalJudge(msgspec.Struct, frozen=True, kw_only=True):
    """The model that judges attempts by a rubric. An empty `agent` means the goal run's agent."""

    agent: str = ""
    rubric: str


class GoalCriterion(msgspec.Struct, frozen=True, kw_only=True):
    """The condition under which a goal is met: a judge, or a call to `tool_name` with an optional CEL expression."""

    tool_name: str = ""
    arguments_json: bytes = b""
    expression: str = ""
    judge: GoalJudge | None = None


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """An aim to pursue in several attempts. See pawl.event.v1.Goal for the fields."""

    aim: str
    attempts_by: GoalAgent = field(default_factory=GoalAgent)
    criterion: GoalCriterion
    attempts_max: int = 10
    deadline_time: float | None = None
    wait_seconds: float = 0.0


class RunAbove(msgspec.Struct, frozen=True, kw_only=True):
    """An ancestor of a run, with its conversation and agent. `agent_name` is empty if the agent is unknown."""

    run_id: RunId
    conversation_id: ConversationId
    agent_name: str = ""


class Delegation(msgspec.Struct, frozen=True, kw_only=True):
    """A run to create: its first message, its options, and its ancestors, the parent last."""

    call_id: CallId
    run_id: RunId
    text: str
    options: RunOptions
    above: tuple[RunAbove, ...]
    # Number of delegations above it. A job has the same depth as the run that starts it.
    depth: int
    user_roles: tuple[str, ...] = ()
    # None for the deployment's `default`.
    agent: PinnedAgent | None = None
    # The background job of a DETACHED call; None if the caller waits.
    job: Job | None = None
    # The workflow version and input of a workflow run.
    workflow: PinnedWorkflow | None = None
    # The goal of a goal run.
    goal: Goal | None = None
    # Whether the run ends only when all jobs that it and the runs below it started have ended.
    waits_for_jobs: bool = False
    # The undo of its parent's calls, if the run is an undo.
    undo: Undo | None = None
    traceparent: str = ""
    trace_link: str = ""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One execution in a conversation. If `undo` is set, it undoes another run."""

    store_id: StoreId
    user_id: UserId
    conversation_id: ConversationId
    run_id: RunId
    state: RunState = RunState.QUEUED
    waits: tuple[WaitKind, ...] = ()
    options: RunOptions = field(default_factory=RunOptions)
    # The root run whose token budget also counts this run's tokens; empty if there is none.
    budget_run_id: RunId = RunId("")
    tools: tuple[PinnedTool, ...] = ()
    round: int = 0
    last_seq: int = 0
    usage: Usage = field(default_factory=Usage)
    # The part of `usage` that belongs to child runs.
    delegated_usage: Usage = field(default_factory=Usage)
    # The minimum top-up, while the run waits for one.
    tokens_needed: int = 0
    failure: RunFailure | None = None
    stop_cause: StopCause | None = None
    output_text: str = ""
    # Number of scheduled times of a series that passed without an iteration, up to the end of its latest iteration.
    missed_iterations: int = 0
    job_progress: JobProgress | None = None
    active_seconds: float = 0.0
    unstopped_call_ids: tuple[CallId, ...] = ()
    # The roles that the user had when the run started.
    user_roles: tuple[str, ...] = ()
    undo: Undo | None = None
    # The run whose call this run carries out; empty if it is not a child run.
    parent_run_id: RunId = RunId("")
    parent_call_id: CallId = CallId("")
    # Number of delegations above it.
    depth: int = 0
    # Ancestors, including those through jobs; the parent is last. Rules that restrict them also restrict this run.
    above: tuple[RunAbove, ...] = ()
    # The credential that started it or its ancestor; empty if unknown.
    credential_id: CredentialId = CredentialId("")
    # The delegate's user, if a delegate started it; otherwise empty.
    delegate_user_id: UserId = UserId("")
    # None for the deployment's `default`.
    agent: PinnedAgent | None = None
    # The last answer as JSON, if it matches the response format.
    output_json: bytes = b""
    # The client-supplied tools.
    own_tools: OwnTools | None = None
    # The background call, if the run is a job.
    job: Job | None = None
    # The workflow version and input, if it is a workflow run.
    workflow: PinnedWorkflow | None = None
    # The goal, if it is a goal run.
    goal: Goal | None = None
    # Whether the run ends only when all jobs that it and the runs below it started have ended.
    waits_for_jobs: bool = False
    # The conversation that a job reports to.
    reports_to_conversation_id: ConversationId = ConversationId("")
    # Number of turns leading to this run that were started by job notices rather than by messages.
    generation: int = 0
    # The latest approval of a job's iterations, if any.
    grant: Grant | None = None
    # The context of the span that started it: the run continues its trace, or has its own trace that links to it.
    traceparent: str = ""
    trace_link: str = ""
    # The context of its first span, once it is recorded.
    trace: str = ""

    @property
    def own_tokens(self) -> int:
        """Tokens used by the run's own model calls, excluding those used by its agents."""
        return self.usage.total_tokens - self.delegated_usage.total_tokens

    @property
    def is_job(self) -> bool:
        return self.job is not None and bool(self.reports_to_conversation_id)

    @property
    def times_itself(self) -> bool:
        """True if the program itself limits the run's time. Run and round timeouts then do not apply."""
        return self.is_job or self.workflow is not None or self.goal is not None

    @property
    def acts_for_conversation_id(self) -> ConversationId:
        """The conversation whose rules apply. For a job, this is the conversation to which it reports."""
        return self.reports_to_conversation_id or self.conversation_id

    @property
    def chain(self) -> tuple[RunAbove, ...]:
        """Ancestors of any run that this run starts."""
        own = RunAbove(run_id=self.run_id, conversation_id=self.acts_for_conversation_id, agent_name=self.agent_name)
        return (*self.above, own)

    @property
    def is_turn(self) -> bool:
        """True if job notices started the run, rather than a message."""
        return self.generation > 0 and not self.reports_to_conversation_id

    @property
    def series(self) -> Series | None:
        """A repeating job's iterations, with their current grant (if any). None for other runs."""
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
        """Return the digest of a client-supplied tool, or an empty value for other tools."""
        return next((tool.definition_sha256 for tool in self.tools if tool.name == name), "")

    @property
    def agent_name(self) -> str:
        """The name of the run's agent, which may be the deployment's `default`."""
        return self.agent.name if self.agent else DEFAULT_AGENT

    def tool_version(self, name: str) -> int:
        """Return the pinned version of a tool, or 0 if the run does not have the tool."""
        return next((tool.version for tool in self.tools if tool.name == name), 0)


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A job's report to its conversation on an iteration. An `occasion` of 0 reports the end of the job.

    `run` is the job's state. If the job makes only one call, an `occasion` above the run's round reports progress.
    """

    run: Run
    occasion: int
